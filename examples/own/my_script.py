"""A training script."""

from my_samples import Net, Numbers
from torch import nn
from torch.utils.data import DataLoader

from train_multi_gpu import train_with_multi_gpu

if __name__ == "__main__":
    loader = DataLoader(Numbers("train"), batch_size=16, shuffle=True)
    results = train_with_multi_gpu(Net(2), loader, criterion=nn.CrossEntropyLoss(), num_epochs=2, screen="quiet")
    print("epochs", results["epochs_completed"])
