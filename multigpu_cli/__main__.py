"""`python -m multigpu_cli`: the same as the command `multigpu`."""

from main_multi_gpu import main

if __name__ == "__main__":
    main()
