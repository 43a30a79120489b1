"""A logger of your own: the last number of each step, in a SQLite file beside the run.

Usage: python main_multi_gpu.py --logger own_logger:SQLite
"""

import sqlite3
from typing import Any


class SQLite:
    def open(self, run_id: str, config: dict[str, Any]) -> None:
        self.run_id = run_id
        self.file = sqlite3.connect("runs.db")
        with self.file:
            self.file.execute("create table if not exists runs (run, name, value, primary key (run, name))")
            self.file.execute("create table if not exists rows (run, step, name, value, primary key (run, step, name))")
            settings = [(run_id, name, str(value)) for name, value in config.items()]
            self.file.executemany("insert or replace into runs values (?, ?, ?)", settings)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        rows = [(self.run_id, step, name, value) for name, value in numbers.items()]
        with self.file:  # on disk when `log` returns
            self.file.executemany("insert or replace into rows values (?, ?, ?, ?)", rows)

    def close(self) -> None:
        self.file.close()
