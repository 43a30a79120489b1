"""The networks by name; nothing is imported until one is asked for.

A name that ends with a slash is a library's: its own names follow, as in timm/resnet18.
"""

MODELS = {
    "mlp": "multigpu_cli.models.mlp:build",
    "convnet": "multigpu_cli.models.convnet:build",
    "resnet18": "multigpu_cli.models.resnet:resnet18",
    "har-convnet": "multigpu_cli.models.har_convnet:build",
    "transformers": "multigpu_cli.models.hugging_face:build",
    "pretrained": "multigpu_cli.models.pretrained:build",
    "timm/": "multigpu_cli.models.timm_networks:list_networks",
    "torchvision/": "multigpu_cli.models.torchvision_networks:list_networks",
    "gpt": "multigpu_cli.models.gpt:build",
    "actor-critic": "multigpu_cli.models.actor_critic:build",
    "lstm-actor-critic": "multigpu_cli.models.actor_critic:build_lstm",
    "clstm-actor-critic": "multigpu_cli.models.clstm:build",
}
