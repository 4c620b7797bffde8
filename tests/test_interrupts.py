"""Ctrl-C in the middle of a block, under every disposition that SIGINT may have had before."""

import signal
import subprocess
import sys
from threading import Thread

import pytest

from specserve.process import interrupts_held

HELD = """
import signal
from specserve.process import interrupts_held

try:
    {before}
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        print("whole", flush=True)
    print("after", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
BEFORE = {  # disposition -> how it is set, what is printed, how the process ends
    "the default handler": ("pass", "whole interrupted", 0),
    "a callable": (
        "signal.signal(signal.SIGINT, lambda number, frame: print('handled', number))",
        "whole handled 2 after",
        0,
    ),
    "SIG_DFL": ("signal.signal(signal.SIGINT, signal.SIG_DFL)", "", -signal.SIGINT),
    "SIG_IGN": ("signal.signal(signal.SIGINT, signal.SIG_IGN)", "whole after", 0),
}


def run(before, **options):
    code = HELD.format(before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


@pytest.mark.parametrize(("before", "printed", "exit_code"), BEFORE.values(), ids=BEFORE)
def test_an_interrupt_takes_effect_as_it_would_have_without_the_block(before, printed, exit_code):
    done = run(before)
    assert (done.stdout.split(), done.returncode) == (printed.split(), exit_code), done.stderr


HANDLER_IN_C = """
#include <signal.h>
#include <unistd.h>
static void handle(int number) { write(1, "in C\\n", 5); }
__attribute__((constructor)) static void install(void) { signal(SIGINT, handle); }
"""


def test_a_handler_that_was_not_installed_from_python_stays_in_place(tmp_path):
    source, library = tmp_path / "handler.cpp", tmp_path / "handler.so"
    source.write_text(HANDLER_IN_C)
    subprocess.run(["c++", "-w", "-shared", "-fPIC", source, "-o", library], check=True)
    before = "assert signal.getsignal(signal.SIGINT) is None"
    done = run(before, env={"LD_PRELOAD": str(library)})
    assert (done.stdout, done.returncode) == ("in C\nwhole\nafter\n", 0), done.stderr


def test_a_block_that_fails_loses_no_interrupt():
    with pytest.raises(KeyboardInterrupt) as raised, interrupts_held():
        signal.raise_signal(signal.SIGINT)
        raise MemoryError
    assert isinstance(raised.value.__context__, MemoryError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_that_is_never_interrupted_leaves_the_handler_alone():
    handlers = []

    def hold():
        with interrupts_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
