"""Ops that run in another process, for a CPU that this machine has not: native/server.cpp."""

import ctypes
import gc
import struct
import subprocess
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from specserve_kernels.cpu import build, native

SYMBOL, CALL, TEXT, RUN = range(4)
MAX_ADDRESSES = 64  # in a tensor


class Server:
    """Takes the place of the library of kernels."""

    def __init__(self, command):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(list(map(str, command)), stdin=pipe, stdout=pipe)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def send(self, *parts):
        """Numbers as 64 bits, bytes as they are."""
        raw = [p if isinstance(p, bytes) else struct.pack("<q", p or 0) for p in parts]
        self.process.stdin.write(b"".join(raw))

    def receive(self, size):
        self.process.stdin.flush()
        data = self.process.stdout.read(size)
        assert len(data) == size, "the process that runs the ops has ended"
        return data

    def number(self):
        return struct.unpack("<q", self.receive(8))[0]

    def address(self, name):
        name = f"specserve_{name}".encode()
        self.send(SYMBOL, len(name), name)
        return self.number()

    def __getattr__(self, name):
        if not name.startswith("specserve_"):
            raise AttributeError(name)
        return Function(self, name.encode())

    def send_blobs(self, blobs):
        self.send(len(blobs))
        for blob in blobs:
            self.send(blob.address, blob.size, blob.is_struct, blob.read())

    def run(self, array, step, threads):
        """As `native.run`: everything that the ops can reach is sent, and tensors come back."""
        sent = reachable(array, step)
        self.send(RUN)
        self.send_blobs(sent)
        self.send(ctypes.addressof(array), len(array), ctypes.addressof(step), threads)
        for blob in sent:
            if not blob.is_struct:
                ctypes.memmove(blob.address, self.receive(blob.size), blob.size)


class Function:
    """A function of the library that is no op."""

    restype = argtypes = None

    def __init__(self, server, name):
        self.server, self.name = server, name

    def __call__(self, *args):
        if self.restype is ctypes.c_char_p:
            self.server.send(TEXT, len(self.name), self.name)
            return self.server.receive(self.server.number())
        numbers = [getattr(x, "value", x) for x in args]
        pointers = [x.value for x in args if isinstance(x, ctypes.c_void_p)]
        self.server.send(CALL, len(self.name), self.name)
        self.server.send_blobs([blob for blob in known_blobs() if blob.holds_any(pointers)])
        self.server.send(len(numbers), *numbers)
        return self.server.number()


class Blob:
    """A piece of this process's memory."""

    def __init__(self, address, size, is_struct):
        self.address, self.size, self.is_struct = address, size, is_struct

    def holds_any(self, addresses):
        return any(self.address <= x < self.address + self.size for x in addresses if x)

    def read(self):
        return ctypes.string_at(self.address, self.size)


def blob_of(x):
    if isinstance(x, torch.Tensor):
        storage = x.untyped_storage()
        return Blob(storage.data_ptr(), storage.nbytes(), False)
    return Blob(ctypes.addressof(x), ctypes.sizeof(x), True)


def objects():
    """The structs and tensors of this process that the collector knows."""
    kinds = torch.Tensor, ctypes.Structure, ctypes.Array
    return [x for x in gc.get_objects() if issubclass(type(x), kinds)]


@cache
def early_objects():
    """Those from before the first call. gc.get_objects lacks what the tests' set-up froze."""
    gc.unfreeze()
    found = objects()
    gc.freeze()
    return found


def known_blobs():
    blobs = map(blob_of, [*early_objects(), *objects()])
    return [blob for blob in blobs if blob.size > 0]


def reachable(*roots):
    """The structs and tensors to which the roots have pointers, and those structs', and so on. A
    tensor of addresses counts as a struct.
    """
    known = known_blobs()
    found, todo = {}, [blob_of(root) for root in roots]
    while todo:
        blob = todo.pop()
        found[blob.address, blob.size] = blob
        if not blob.is_struct and blob.size > MAX_ADDRESSES * 8:
            continue
        words = struct.unpack(f"<{blob.size // 8}Q", blob.read()[: blob.size // 8 * 8])
        held = [other for other in known if other.holds_any(words)]
        used = [word for word in words if word]
        blob.is_struct |= bool(used) and all(any(x.holds_any([w]) for x in held) for w in used)
        if not blob.is_struct:
            continue
        todo += [other for other in held if (other.address, other.size) not in found]
    return list(found.values())


@contextmanager
def running_through(server):
    """The ops of `specserve_kernels.cpu` run in the server's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "kernels", lambda: build.Kernels(server, "in another process"))
        patch.setattr(native, "run", server.run)
        patch.setattr(native, "address", server.address)
        yield
