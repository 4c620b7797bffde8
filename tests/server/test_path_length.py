"""How many files a token passes through, from a request's bytes to those of its last event."""

import threading
from pathlib import Path

import specserve
import specserve_drafters
import specserve_kernels
from tests.engine.clock import Clock
from tests.server.asking import CHAT, chat_body
from tests.server.in_process import server_threads

MOST = 34
PACKAGES = specserve, specserve_drafters, specserve_kernels
FOLDERS = tuple(f"{Path(p.__file__).parent}/" for p in PACKAGES)


class CallRecorder:
    """Notes, while it is on, every file of ours in which a function is called."""

    def __init__(self):
        self.is_on, self.files = False, set()

    def __call__(self, frame, event, arg):
        file = frame.f_code.co_filename
        if self.is_on and event == "call" and file.startswith(FOLDERS):
            self.files.add(file)


def test_a_streamed_chat_runs_code_of_few_files(folder, monkeypatch):
    Clock(monkeypatch)  # what is guessed, and so what runs, must not depend on this machine
    recorder = CallRecorder()
    threading.setprofile(recorder)  # of every thread that begins from here on
    try:
        with server_threads(folder) as server:
            # What is done once, at first use, is start-up. No prefix is found, so none is copied.
            server.stream(CHAT, chat_body(messages=[{"role": "user", "content": "a mat, a dog"}]))
            recorder.is_on = True
            events = server.stream(CHAT, chat_body())
            recorder.is_on = False
    finally:
        threading.setprofile(None)
    assert events[-1] == "[DONE]" and len(events) > 2
    assert {"connection.py", "stream.py", "engine.py"} <= {Path(f).name for f in recorder.files}
    print(*sorted(recorder.files), sep="\n")
    assert len(recorder.files) <= MOST, sorted(recorder.files)
