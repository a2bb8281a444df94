"""vLLM's hidden-states connector for hosts without an accelerator: its own copies through pinned memory, which a CPU
build has not, and the server ends at the first request. Runs in vLLM's Python, found by PYTHONPATH (docs/scaling.md).
"""

import fcntl
import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllm_connector


class Done:
    """The copy's event: the copy is through when `_submit_async_write` returns."""

    def query(self):
        return True


class HostStatesConnector(vllm_connector.ExampleHiddenStatesConnector):
    """The same files and locks, written at once."""

    def _submit_async_write(self, pending):
        if not self._is_tp_rank_zero:
            return
        offset = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offset).flatten()
        states_TAD = vllm_connector.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            save_file({"hidden_states": states_TAD.contiguous(), "token_ids": pending.token_ids}, pending.filename)
        finally:
            if lock is not None:
                os.close(lock)
        self._req_copy_events[pending.req_id] = Done()
