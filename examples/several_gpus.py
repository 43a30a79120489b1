"""Handwritten digits, a small network, ten epochs."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from train_multi_gpu import train_with_multi_gpu

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    train_loader = DataLoader(dataset, batch_size=8, shuffle=True)  # per device

    train_with_multi_gpu(
        model, train_loader, optimizer, criterion, num_epochs=10, global_batch_size=32, save_dir="runs/digits"
    )


if __name__ == "__main__":
    main()
