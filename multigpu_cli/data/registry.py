"""The built-in datasets by name; a module is imported when its dataset is requested."""

DATASETS = {
    "digits": "multigpu_cli.data.digits:load",
    "har": "multigpu_cli.data.har:load",
    "mnist": "multigpu_cli.data.mnist:mnist",
    "fashion-mnist": "multigpu_cli.data.mnist:fashion_mnist",
    "cifar10": "multigpu_cli.data.cifar10:load",
    "synthetic": "multigpu_cli.data.synthetic:load",
    "image-folder": "multigpu_cli.data.image_folder:load",
    "csv": "multigpu_cli.data.csv_table:load",
    "arrow": "multigpu_cli.data.arrow:load",
    "jsonl": "multigpu_cli.data.json_rows:load",
    "tar": "multigpu_cli.data.tar_rows:load",
    "mixture": "multigpu_cli.data.mixture:load",
    "npz": "multigpu_cli.data.npz:load",
    "text": "multigpu_cli.data.text:load",
    "chat": "multigpu_cli.data.chat:load",
}
