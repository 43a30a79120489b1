"""How DistributedSampler divides seven samples: python examples/lesson/samplers.py"""

from torch.utils.data import DistributedSampler

SAMPLES, WORKERS = range(7), 2


def shares(*, epoch: int | None = None, **options: bool) -> list[list[int]]:
    """The samples of each worker."""
    samplers: list[DistributedSampler[int]] = [
        DistributedSampler(SAMPLES, WORKERS, rank, **options)  # type: ignore[arg-type]  # it only asks for a length
        for rank in range(WORKERS)
    ]
    for sampler in samplers:
        if epoch is not None:
            sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def main() -> None:
    padded, cut = shares(shuffle=False), shares(shuffle=False, drop_last=True)
    print("seven samples, two workers:", padded)
    print("with drop_last:", cut)
    print("two epochs without set_epoch have the same order:", shares() == shares())
    print("two epochs with set_epoch have the same order:", shares(epoch=0) == shares(epoch=1))


if __name__ == "__main__":
    main()
