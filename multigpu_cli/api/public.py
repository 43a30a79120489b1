"""The names of the Python API, all of which `train_multi_gpu` offers."""

from multigpu_cli.api.monitoring import MetricsCollector as MetricsCollector
from multigpu_cli.api.monitoring import PerformanceMonitor as PerformanceMonitor
from multigpu_cli.api.monitoring import clear_gpu_memory as clear_gpu_memory
from multigpu_cli.api.monitoring import estimate_training_speedup as estimate_training_speedup
from multigpu_cli.api.monitoring import get_gpu_info as get_gpu_info
from multigpu_cli.api.monitoring import launch_distributed_training as launch_distributed_training
from multigpu_cli.api.monitoring import optimize_batch_size_for_multi_gpu as optimize_batch_size_for_multi_gpu
from multigpu_cli.api.monitoring import print_gpu_info as print_gpu_info
from multigpu_cli.api.monitoring import print_training_speedup_estimates as print_training_speedup_estimates
from multigpu_cli.api.settings import MultiGPUConfig as MultiGPUConfig
from multigpu_cli.api.settings import TrainingMode as TrainingMode
from multigpu_cli.api.trainers import DataParallelTrainer as DataParallelTrainer
from multigpu_cli.api.trainers import DistributedDataParallelTrainer as DistributedDataParallelTrainer
from multigpu_cli.api.trainers import FaultToleranceManager as FaultToleranceManager
from multigpu_cli.api.trainers import MultiGPUTrainer as MultiGPUTrainer
from multigpu_cli.api.trainers import MultiGPUTrainingManager as MultiGPUTrainingManager
from multigpu_cli.api.training import evaluate_with_multi_gpu as evaluate_with_multi_gpu
from multigpu_cli.api.training import train_with_multi_gpu as train_with_multi_gpu

multi_gpu_trainer = MultiGPUTrainer()
"""The trainer that the functions of the API belong to: they share its `current_strategy` and its metrics."""
setup_data_parallel = multi_gpu_trainer.setup_data_parallel
setup_distributed_data_parallel = multi_gpu_trainer.setup_distributed_data_parallel
setup_multi_gpu_training = multi_gpu_trainer.setup_multi_gpu_training
cleanup_distributed = multi_gpu_trainer.cleanup_distributed
log_training_metrics = multi_gpu_trainer.log_training_metrics
get_multi_gpu_metrics = multi_gpu_trainer.get_multi_gpu_metrics
get_multi_gpu_status = multi_gpu_trainer.get_multi_gpu_status
