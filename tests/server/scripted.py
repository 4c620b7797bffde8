"""A server whose engine says what tests tell it to: a text, in steps of some tokens each."""

import asyncio
import contextlib
import threading
from collections import Counter
from types import SimpleNamespace

import uvloop

from specserve.api.input_processor import TextFiles, make_input_processor
from specserve.config import Config, load_config
from specserve.errors import RequestError
from specserve.exchange.messages import Ready, StepOutput, TokenLogprobs
from specserve.exchange.sleep import AWAKE
from specserve.server.completion import ServedModel, Service
from specserve.server.listen import listen
from specserve.server.serve import Server
from specserve.text.answer.formats import formats_of
from specserve.text.chat_template import ChatTemplate
from specserve.text.defaults import GenerationDefaults
from specserve.text.grammars.compiled import GrammarError, compile_grammar, vocabulary_of
from specserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS
from tests.server.server_process import ServerProcess, eventually

MAX_LEN = 4096


class ScriptedEngine:
    """Says `script` to every request: token ids, and where steps end; at most `max_tokens`."""

    def __init__(self):
        self.died, self.next_id, self.added, self.script = asyncio.Event(), 0, [], ([], [])
        self.finished = set()
        self.loop = asyncio.get_running_loop()
        self.silence, self.sleep_state = 0.0, AWAKE

    def check_awake(self):
        pass

    def add(self, token_ids, samplings, listeners, keys=None, caller=None, adapter=None):
        ids = [*range(self.next_id, self.next_id + len(samplings))]
        self.next_id += len(samplings)
        self.added.append(SimpleNamespace(prompt=token_ids, sampling=samplings[0]))
        for id, listener in zip(ids, listeners, strict=True):
            self.loop.call_soon(self.say, id, listener, samplings[0])
        return ids

    def say(self, id, listener, sampling):
        tokens, ends = self.script
        is_cut = len(tokens) > sampling.max_tokens
        tokens = tokens[: sampling.max_tokens]
        begins = [0, *(end for end in sorted({*ends}) if 0 < end < len(tokens))]
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
            reason = None if end < len(tokens) else "length" if is_cut else "stop"
            has_logprobs = sampling.logprobs is not None
            told = [TokenLogprobs(-1.0, 1, [], []) for _ in tokens[begin:end] if has_logprobs]
            if id in self.finished:
                return
            step = tokens[begin:end], reason, True, 0, 0, 0.0
            listener.push(StepOutput(id, *step, logprobs=told))

    def finish(self, id):
        self.finished.add(id)

    def close(self):
        pass


class Grammars:
    """Checks grammars without a process."""

    def __init__(self, tokenizer, size):
        self.asked = Counter()
        self.vocabulary = vocabulary_of(tokenizer, size, [tokenizer.get_vocab()[EOS]])

    async def check(self, grammar, field, salt):
        try:
            compile_grammar(self.vocabulary, grammar)
        except GrammarError as e:
            raise RequestError(f"{field}: {e}", field) from e

    async def close(self):
        pass


class ScriptedServer(ServerProcess):
    """To be asked like a real one."""

    def __init__(self, tokenizer, config, engine=ScriptedEngine):
        self.tokenizer, self.config, self.make_engine = tokenizer, config, engine
        self.started = threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        assert self.started.wait(30)
        eventually(lambda: self.get("/health").status == 200, seconds=30)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join()

    def run(self):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve())

    async def serve(self):
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        self.engine = engine = self.make_engine()
        service = Service(self.config, engine)
        size = self.tokenizer.backend.get_vocab_size()
        ready = Ready({}, "none", size, MAX_LEN, "fp32", "fp32", "", 16, 1, {})
        defaults = GenerationDefaults(eos_token_ids=(self.tokenizer.get_vocab()[EOS],))
        files = TextFiles(self.tokenizer, defaults)
        service.prompts.start_templates(self.tokenizer.chat_template)
        asked = self.config.server
        formats = formats_of(self.tokenizer, asked.tool_parser, asked.reasoning_parser)
        served = ServedModel(service.name, "fp", "none", 0, [], "fp32", formats=formats)
        service.open(make_input_processor(files, size, MAX_LEN, (), formats), served, ready)
        service.prompts.grammars = Grammars(self.tokenizer, size)
        server = Server(service)
        with listen(self.config.server) as listener:
            self.port = listener.getsockname()[1]
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            self.started.set()
            await self.ended.wait()
            await server.leave(serving)
        await service.close()

    @contextlib.contextmanager
    def saying(self, text, size=None, ends=()):
        """Answers are this text and an end token, in steps of `size` tokens, or ending there."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids.append(self.tokenizer.get_vocab()[EOS])
        self.engine.script = ids, ends or range(0, len(ids), size or len(ids))
        yield len(ids)

    @property
    def last(self):
        return self.engine.added[-1]


def scripted(tokenizer, engine=ScriptedEngine, **settings):
    config: Config = load_config(None, {"server.port": 0} | settings)
    return ScriptedServer(tokenizer, config, engine)


def with_template(backend, source, response_template=None, tool_use=None):
    template = ChatTemplate(source, {"eos_token": EOS}, tool_use)
    return Tokenizer(backend, "scripted", template, response_template)
