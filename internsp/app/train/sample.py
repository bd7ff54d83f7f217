"""A text sample that the trained model generates on rank 0 from its unsharded weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from internsp.app.models.factory import build_for_load, generate
from internsp.app.session.session import Session

_TEMPERATURE, _TOP_K = 0.8, 40


def sample(session: Session) -> str:
    """Continue ``train.sample_prompt`` by ``train.sample_tokens`` tokens. Collective.

    All ranks take part in all-gathering the weights, one at a time, to the CPU of rank 0; only rank
    0 generates.

    Returns:
        Prompt and continuation on rank 0; an empty text on other ranks, or if no sample is
        configured.
    """
    train = session.config.train
    if (
        not train.sample_tokens
        or session.custom.model is not None
        or session.custom.data is not None
    ):
        return ""  # a custom model cannot be built again here, and custom data has no tokenizer
    mesh = session.mesh
    main = mesh.rank == 0
    first = dist.get_rank(mesh.stage_group) == 0  # first rank of its stage
    state: dict[str, torch.Tensor] = {}
    for module, communicator in zip(session.modules, session.communicators, strict=True):
        communicator.wait_until_ready()
        for name, kept in module.state_dict().items():
            tensor = kept.full_tensor() if isinstance(kept, DTensor) else kept
            if first:
                state[name] = tensor.cpu()
    if first and mesh.pipeline > 1:
        parts: list[dict[str, torch.Tensor] | None] = [None] * mesh.pipeline
        dist.gather_object(state, parts if main else None, group=mesh.pipeline_group, group_dst=0)
        state = {name: value for part in parts if part for name, value in part.items()}
    if not main:
        return ""
    model = build_for_load(session.config)
    model.load_state_dict(state, assign=True)
    tokenizer = session.source.tokenizer
    assert tokenizer is not None, "only a program's own data has none"
    # A prompt without tokens starts as every document does: after the end of another one.
    begin = tokenizer.encode(train.sample_prompt) or [tokenizer.end_of_document]
    prompt = torch.tensor(begin, dtype=torch.int64)
    ids = generate(
        model,
        prompt,
        train.sample_tokens,
        temperature=_TEMPERATURE,
        top_k=_TOP_K,
        seed=train.seed,
        stop_id=tokenizer.end_of_document,
    )
    return str(tokenizer.decode(ids.tolist()))
