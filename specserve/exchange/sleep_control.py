"""Puts the engine of a client to sleep, and wakes it up."""

import asyncio
from collections.abc import Callable, Sequence

from specserve.errors import ConfigError, Sleeping
from specserve.exchange.client import EngineClient
from specserve.exchange.sleep import AWAKE, SLEEP_TAGS, SleepState

LOOK_SECONDS = 0.02  # seconds between two looks for the last running request
ABORTED = "the engine was put to sleep before the response was complete. Wake it up, and retry"


class SleepControl:
    """Commands run one at a time. `Sleeper` describes their effect on the engine. A command runs to
    its end even if its caller is cancelled, because the engine completes it as well.

    A process that ends while it sleeps is replaced at the next wake-up.
    """

    def __init__(
        self,
        client: EngineClient,
        on_change: Callable[[SleepState], None] = lambda state: None,
        release_shared: Callable[[], None] = lambda: None,
    ) -> None:
        """`release_shared` drops the weights that new engine processes would share."""
        self.client, self.on_change, self.release_shared = client, on_change, release_shared
        self.commands = asyncio.Lock()

    @property
    def state(self) -> SleepState:
        return self.client.sleep_state

    async def sleep(self, level: int, mode: str) -> SleepState:
        """Release memory; refuse requests from now on. `mode` decides about running requests:
        "abort" ends them, "wait" waits for their end, "keep" continues them after the wake-up.

        ConfigError, with the engine awake, if it cannot sleep. Overloaded if its process ends.
        """
        return await asyncio.shield(asyncio.create_task(self.sleep_alone(level, mode)))

    async def sleep_alone(self, level: int, mode: str) -> SleepState:
        async with self.commands:
            client = self.client
            client.is_falling_asleep = True
            try:
                if mode == "abort":
                    client.abort(Sleeping(ABORTED))
                while mode == "wait" and client.live:
                    await asyncio.sleep(LOOK_SECONDS)
                if self.state.level == 0:
                    await client.revived()  # if it has just died
                if client.is_up:
                    self.change(accepted(await client.ask_sleep(level)))
                elif level > self.state.level:
                    self.change(SleepState(level, SLEEP_TAGS))  # the process has ended
            finally:
                client.is_falling_asleep = False
            if self.state.level == 2:
                self.release_shared()
            return self.state

    async def wake_up(self, tags: Sequence[str]) -> SleepState:
        """Restore the memory of these parts.

        ConfigError if memory or files are missing; the engine still sleeps then. Overloaded if
        its process ends.
        """
        return await asyncio.shield(asyncio.create_task(self.wake_up_alone(tags)))

    async def wake_up_alone(self, tags: Sequence[str]) -> SleepState:
        async with self.commands:
            before = self.state
            if before.level == 0:
                return before
            await self.client.revived()
            accepted(await self.client.ask_sleep(wake_up=tags))
            left = tuple(tag for tag in before.tags if tag not in tags)
            self.change(SleepState(before.level, left) if left else AWAKE)
            return self.state

    def change(self, state: SleepState) -> None:
        self.client.sleep_state = state
        self.on_change(state)


def accepted(reply: SleepState) -> SleepState:
    if reply.refusal:
        raise ConfigError(reply.refusal)
    return reply
