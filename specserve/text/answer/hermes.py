"""Calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

from specserve.text.answer.reading import CallParser, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
FRAME = f"{BEGIN}\n", f"\n{END}"


class HermesParser(CallParser):
    def read_part(self) -> Steps:
        self.kept = [(yield from self.until(BEGIN))]
        yield from self.call()
        yield from self.space()
        yield from self.follows(END)  # a model that forgets it means no text either
        yield from self.space()
