"""Eight beginnings of Python files, written for this benchmark: no model was trained on them."""

PROMPTS = [
    '''import csv
from pathlib import Path


def load_orders(path: Path) -> list[dict[str, str]]:
    """All rows of the orders file, without those that were cancelled."""
    with path.open(newline="") as file:
''',
    '''class Matrix:
    """A dense matrix of floats, row by row."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]

    def transpose(self):
        return Matrix(zip(*self.rows))

    def __matmul__(self, other):
''',
    """import argparse
import sys


def main(argv=None):
    parser = argparse.ArgumentParser(description="Count the words of text files.")
    parser.add_argument("files", nargs="+", help="files to read")
    parser.add_argument("--top", type=int, default=10, help="how many words to print")
""",
    """import unittest

from inventory import Item, Store


class StoreTest(unittest.TestCase):
    def setUp(self):
        self.store = Store([Item("bolt", 4), Item("nut", 7)])

    def test_total(self):
        self.assertEqual(self.store.total(), 11)

    def test_remove(self):
""",
    """import socket
import threading


class EchoServer:
    def __init__(self, host="127.0.0.1", port=0):
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.bind((host, port))
        self.socket.listen()

    def serve(self):
        while True:
""",
    '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
''',
    '''import json
import logging
from datetime import datetime, timedelta

logger = logging.getLogger(__name__)


def expire(cache, now=None):
    """Drop every entry of the cache that is older than a day."""
    now = now or datetime.now()
    for key, entry in list(cache.items()):
''',
    """@dataclass
class Point:
    x: float
    y: float

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
        return Point(self.x - other.x, self.y - other.y)

    def norm(self):
""",
]
