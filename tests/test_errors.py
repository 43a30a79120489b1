"""What messages are made of."""

from multigpu_cli.errors import did_you_mean


def test_the_closest_name_is_suggested_and_a_long_list_is_cut() -> None:
    names = [f"network_{number:03}" for number in range(400)]
    assert did_you_mean("netwrk_007", names) == "did you mean 'network_007'?"
    assert did_you_mean("x", ["b", "a"]) == "one of: a, b"
    listed = did_you_mean("google/vit", names)
    assert listed.startswith("one of: network_000, network_001, ")
    assert listed.endswith(", network_029, … (400 in all)")
