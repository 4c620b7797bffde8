"""ik_llama.cpp through the C API of ik-llama-cpp-python, which is almost llama.cpp's."""

from specserve_bench.peers.adapters.llama import Llama, LlamaModel
from specserve_bench.peers.protocol import Setup, serve


class IkModel(LlamaModel):
    def clear(self) -> None:
        self.api.llama_kv_cache_clear(self.context)


def load(setup: Setup) -> Llama:
    import ik_llama_cpp
    from ik_llama_cpp import _ctypes_api

    _ctypes_api.llama_backend_init()
    lengths = setup.max_len, setup.max_requests
    model = IkModel(_ctypes_api, setup.model, *lengths, setup.threads)
    return Llama(model, None, str(ik_llama_cpp.__version__))


if __name__ == "__main__":
    serve(load)
