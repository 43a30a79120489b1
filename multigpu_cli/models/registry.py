"""The networks by name; nothing is imported until one is asked for."""

MODELS = {
    "mlp": "multigpu_cli.models.mlp:build",
    "convnet": "multigpu_cli.models.convnet:build",
    "resnet18": "multigpu_cli.models.resnet:resnet18",
    "har-convnet": "multigpu_cli.models.har_convnet:build",
    "transformers": "multigpu_cli.models.hugging_face:build",
    "gpt": "multigpu_cli.models.gpt:build",
    "actor-critic": "multigpu_cli.models.actor_critic:build",
    "lstm-actor-critic": "multigpu_cli.models.actor_critic:build_lstm",
    "clstm-actor-critic": "multigpu_cli.models.clstm:build",
}
