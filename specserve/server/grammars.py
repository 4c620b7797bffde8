"""Checks grammars in processes of their own, before the engine gets them."""

import msgspec

from specserve.errors import RequestError
from specserve.grammars.verdicts import Verdicts
from specserve.server import grammar_process
from specserve.server.bounded_process import Refused
from specserve.server.grammar_process import TOO_MUCH, Tokens
from specserve.server.processes import Ended, Processes

SECONDS = 0.8  # to compile one, of the second within which it is refused


class GrammarProcesses(Processes):
    def __init__(self, tokens: Tokens) -> None:
        first = msgspec.msgpack.encode(tokens)
        super().__init__(grammar_process.__name__, first, SECONDS, "grammar", at_start=1)
        self.verdicts = Verdicts()

    async def check(self, grammar: str, field: str, salt: str) -> None:
        """RequestError for a grammar that cannot be compiled, or not in time."""
        wrong = self.verdicts.find(grammar, salt)
        if wrong is None:
            wrong = await self.compile(grammar)
            self.verdicts.keep(grammar, wrong, salt)
        if wrong:
            raise RequestError(f"{field}: {wrong}", field)

    async def compile(self, grammar: str) -> str:
        """What is wrong with it."""
        try:
            reply = await self.ask(grammar.encode())
        except TimeoutError:
            return f"it takes more than {self.seconds:g} s to compile: send a simpler one"
        except Ended:  # where memory is missing, or a stack ends, so does the process
            return TOO_MUCH
        return reply.message if isinstance(reply, Refused) else ""
