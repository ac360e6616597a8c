"""Calling conventions: how a problem is put to a function. One table, one row each; names and layouts are in
conventions.txt.

A convention turns a problem into calls. A call takes rows of Q and rows of K and V (gathered into the convention's
layout, or the kernel's memory itself where all rows are taken as they lie), and keywords. It is passed only keywords that
the function takes; where it does not take one that this problem needs, the problem is refused. So a function without
`softcap` is never judged on a softcap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from .problem import Segment
from .view import View

Rows = Any  # int64 array [T] or [B, S] of rows; None: all, as they lie


@dataclass
class Call:
    """One call of the function. `o`: where its output rows belong (None: to the rows of q; -1: nowhere), `do`: rows
    whose gradient it is given (-1: zero)."""

    q: Rows
    keys: tuple[Rows, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    heads_first: bool = False  # [B, H, S, D] instead of [T, H, D]
    o: Rows = None
    do: Rows = None
    pieces: Rows = None  # [T] layout: starts of pieces in which no row of q or keys occurs twice


@dataclass(frozen=True)
class Convention:
    """A row of the table. `needs`: keyword that a problem needs -> what to call it in a refusal."""

    refuses: Callable[["Setting", View], "str | None"]
    needs: Callable[["Setting", View], dict[str, str]]
    calls: Callable[["Setting", View], Iterator[Call]]
    always: tuple[str, ...] = ()  # keywords without which a function cannot be called
    merges: bool = False  # the calls' outputs are partial, to be merged by LSE
    alone: bool = False  # where each segment is a sequence of its own, each row is in one call alone, once
    torch_only: bool = False


@dataclass
class Setting:
    """How a function is to be called: what it takes, the spec's options, the arrays it gets."""

    takes: Callable[[str], bool]
    options: dict[str, str]
    arrays: Any
    lse: bool = False


# ---- what problems need ----


def _default_scale(p: View) -> bool:
    usual = float(p.dqk) ** -0.5
    return bool(abs(p.scale - usual) <= 1e-6 * usual)


def _modifiers(p: View, scale: str, softcap: str = "softcap") -> dict[str, str]:
    """Keywords for scale and score modifiers."""
    out: dict[str, str] = {}
    if not _default_scale(p):
        out[scale] = "a scale other than 1/sqrt(D)"
    if p.softcap:
        out[softcap] = "softcap"
    if p.alibi_slopes is not None:
        out["alibi_slopes"] = "ALiBi"
    if p.sink:
        out["sink"] = "a sink logit"
    return out


def _is_one_sequence(group: list[Segment]) -> bool:
    """Queries of one segment alone."""
    return sum(s.q_len > 0 for s in group) <= 1


def _cut(s: Segment, p: View) -> bool:
    """Does it see less than its whole parent?"""
    if s.parent < 0:
        return False
    parent = p.segments[s.parent]
    return s.context != parent.context + parent.k_len


# ---- packed: ours ----


def _packed_calls(setting: Setting, p: View) -> Iterator[Call]:
    keywords = {"problem": p, "scale": p.scale, "softcap": p.softcap, "sink": None, "alibi_slopes": p.alibi_slopes}
    yield Call(None, (None,), keywords)


# ---- flash-varlen ----


def _window(p: View) -> tuple[int, int]:
    return (p.window - 1, 0) if p.mask == "window" else (-1, -1)


def _flash_mask(p: View) -> str | None:
    if p.mask == "window" and p.window_sinks:
        return "it has no words for a window that keeps the first keys"
    if p.mask not in ("causal", "window", "full"):
        return f"it has no words for mask={p.mask}"
    return None


def _varlen_refuses(setting: Setting, p: View) -> str | None:
    if not all(_is_one_sequence(g) for g in p.groups):
        return f"it has no words for mask={p.mask} of prompt and responses"
    return _flash_mask(p)


def _varlen_needs(setting: Setting, p: View) -> dict[str, str]:
    out = _modifiers(p, "softmax_scale")
    if p.mask == "window":
        out["window_size"] = "a window"
    return out


def _cumulate(lengths: list[int]) -> Any:
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int32)


def _varlen_calls(setting: Setting, p: View) -> Iterator[Call]:
    q = [sum(s.q_len for s in g) for g in p.groups]
    k = [sum(s.k_len for s in g) for g in p.groups]
    constant = setting.arrays.constant
    yield Call(None, (None,), {
        "cu_seqlens_q": constant(_cumulate(q)), "cu_seqlens_k": constant(_cumulate(k)),
        "max_seqlen_q": max(q, default=0), "max_seqlen_k": max(k, default=0), "softmax_scale": p.scale,
        "causal": p.mask != "full", "window_size": _window(p), "softcap": p.softcap,
        "alibi_slopes": None if p.alibi_slopes is None else constant(p.alibi_slopes), "sink": None})


# ---- flash-dualkv ----

PACKINGS = ("every", "first", "separate")


def _packing(setting: Setting) -> str:
    return setting.options["packing"]


def _dualkv_refuses(setting: Setting, p: View) -> str | None:
    if any(s.depth > 1 for s in p.segments):
        return "it has no words for trees: a context and what was decoded, no branches"
    if any(_cut(s, p) for s in p.segments):
        return "it has no words for a response that sees part of its prompt"
    if p.mask == "full" and any(s.depth == 0 and s.q_len for s in p.segments):
        return "it has no words for mask=full where the prompt has queries"
    return _flash_mask(p)


@dataclass
class Decoded:
    """A sequence of flash-dualkv: rows of q of its prompt and its own, and the response (None: the prompt alone)."""

    group: int
    prompt: Any
    own: Any
    response: Segment | None
    home: bool  # here the prompt's rows are given their dO


def _dualkv_sequences(p: View, packing: str) -> list[list[Decoded]]:
    """The sequences of each call."""
    first: list[Decoded] = []
    second: list[Decoded] = []
    for g, group in enumerate(p.groups):
        prompt, responses = p.query_rows(group[0]), group[1:]
        nothing = np.empty(0, np.int64)
        if packing == "separate" or not responses:
            first.append(Decoded(g, prompt, nothing, None, True))
        for i, s in enumerate(responses):
            own = p.query_rows(s)
            with_prompt = packing == "every" or (packing == "first" and i == 0)
            second.append(Decoded(g, prompt if with_prompt else nothing, own, s, i == 0))
    if packing == "separate":
        return [c for c in (first, second) if c]
    return [sorted(first + second, key=lambda c: c.group)]


def _dualkv_calls(setting: Setting, p: View) -> Iterator[Call]:
    constant = setting.arrays.constant
    contexts = [np.arange(g[0].k_start, g[0].k_start + g[0].k_len) for g in p.groups]
    for sequences in _dualkv_sequences(p, _packing(setting)):
        q = [np.concatenate([c.prompt, c.own]) for c in sequences]
        decoded = [np.arange(c.response.k_start, c.response.k_start + c.response.k_len) if c.response
                   else np.empty(0, np.int64) for c in sequences]
        # O of the prompt is read from its last copy; its dO is given to the first.
        last = {c.group: i for i, c in enumerate(sequences) if len(c.prompt)}
        nowhere = [c.prompt * 0 - 1 for c in sequences]
        o = [np.concatenate([c.prompt if last.get(c.group) == i else nowhere[i], c.own])
             for i, c in enumerate(sequences)]
        do = [np.concatenate([c.prompt if c.home else nowhere[i], c.own]) for i, c in enumerate(sequences)]
        lengths = [len(x) for x in q], [len(x) for x in contexts], [len(x) for x in decoded]
        keywords = {"group": constant(np.array([c.group for c in sequences], np.int32)), "softmax_scale": p.scale,
                    "causal": p.mask != "full", "window_size": _window(p), "softcap": p.softcap, "sink": None,
                    "alibi_slopes": None if p.alibi_slopes is None else constant(p.alibi_slopes)}
        for name, n in zip(("q", "context", "decoded"), lengths):
            keywords[f"cu_seqlens_{name}"] = constant(_cumulate(n))
            keywords[f"max_seqlen_{name}"] = max(n, default=0)
        yield Call(np.concatenate(q), (np.concatenate(contexts), np.concatenate(decoded)), keywords,
                   o=np.concatenate(o), do=np.concatenate(do), pieces=_cumulate(lengths[0])[:-1])


# ---- sdpa and prefix-grouper: rows over all keys that they see, [B, H, S, D] ----


def _is_plain(p: View, s: Segment) -> bool:
    """Causal from the first key on: what is_causal says."""
    return p.mask == "causal" and s.context == 0


def _sees_all(p: View, s: Segment) -> bool:
    return p.mask == "full" or (p.mask == "prefix" and s.depth == 0)


def _sdpa_needs(setting: Setting, p: View) -> dict[str, str]:
    out = _modifiers(p, "scale")
    for s in p.segments:
        if s.q_len and _is_plain(p, s):
            out["is_causal"] = "causal attention"
        elif s.q_len and not _sees_all(p, s):
            out["attn_mask"] = f"mask={p.mask}" + (" after a context" if s.context else "")
    if p.hq != p.hkv:
        out["enable_gqa"] = "fewer KV heads than heads"
    return out


BATCH_ROWS = 1 << 18  # of keys in a batch of several sequences: what a call gathers lies beside the kernel's own memory


def _batches(p: View) -> list[list[Segment]]:
    """Segments of equal lengths and the same mask, together; of long ones no more than BATCH_ROWS."""
    out: dict[tuple[int, int, int, bool], list[Segment]] = {}
    for s in p.segments:
        if s.q_len:
            out.setdefault((s.q_len, sum(r.length for r in s.ranges), s.context, s.depth == 0), []).append(s)
    batches = []
    for (_, keys, _, _), segments in out.items():
        most = max(1, BATCH_ROWS // max(keys, 1))
        batches += [segments[i:i + most] for i in range(0, len(segments), most)]
    return batches


def _sdpa_calls(setting: Setting, p: View) -> Iterator[Call]:
    for batch in _batches(p):
        s = batch[0]
        plain = _is_plain(p, s)
        mask = None if plain or _sees_all(p, s) else setting.arrays.constant(p.visible(s))
        yield Call(np.stack([p.query_rows(x) for x in batch]), (np.stack([p.key_rows(x) for x in batch]),),
                   {"is_causal": plain, "attn_mask": mask, "scale": p.scale, "enable_gqa": p.hq != p.hkv, "sink": None,
                    "softcap": p.softcap, "alibi_slopes": p.alibi_slopes}, heads_first=True)


def _grouper_refuses(setting: Setting, p: View) -> str | None:
    return "it has no words for trees" if any(s.depth > 1 for s in p.segments) else None


# ---- cascade: rows over one key range each, merged by LSE ----


def _cascade_refuses(setting: Setting, p: View) -> str | None:
    return None if p.mask in ("causal", "full") else f"it has no words for mask={p.mask}"


def _cascade_needs(setting: Setting, p: View) -> dict[str, str]:
    out = _modifiers(p, "scale")
    if p.hq != p.hkv:
        out["enable_gqa"] = "fewer KV heads than heads"
    if p.sink:
        out["sink, over one part of the keys"] = "a sink logit"
    if p.alibi_slopes is not None:
        out["the distance to another part's keys"] = "ALiBi"
    return out


def _cascade_calls(setting: Setting, p: View) -> Iterator[Call]:
    def keywords(causal: bool) -> dict[str, Any]:
        return {"is_causal": causal, "scale": p.scale, "enable_gqa": p.hq != p.hkv, "softcap": p.softcap}

    over: dict[tuple[int, int], list[Any]] = {}  # rows of all segments that see a range of an ancestor
    for s in p.segments:
        for r in s.ranges:
            if s.q_len and r.start != s.k_start:
                over.setdefault((r.start, r.length), []).append(p.query_rows(s))
    for (start, n), rows in over.items():
        yield Call(np.concatenate(rows)[None], (np.arange(start, start + n)[None],), keywords(False), heads_first=True)
    own: dict[int, list[Segment]] = {}
    for s in p.segments:
        if s.q_len:
            own.setdefault(s.q_len, []).append(s)
    for batch in own.values():
        yield Call(np.stack([p.query_rows(s) for s in batch]),
                   (np.stack([np.arange(s.k_start, s.k_start + s.k_len) for s in batch]),),
                   keywords(p.mask == "causal"), heads_first=True)


# ---- flex ----


def _flex_refuses(setting: Setting, p: View) -> str | None:
    if any(s.depth > 1 for s in p.segments):
        return "its mask of a shared prompt has no words for trees"
    return "it has no words for a sink logit" if p.sink else None


def _flex_needs(setting: Setting, p: View) -> dict[str, str]:
    out = {} if _default_scale(p) else {"scale": "a scale other than 1/sqrt(D)"}
    if p.softcap or p.alibi_slopes is not None:
        out["score_mod"] = "softcap or ALiBi"
    if p.hq != p.hkv:
        out["enable_gqa"] = "fewer KV heads than heads"
    return out


def _formula(p: View) -> Callable[[Any, Any, Any], Any] | None:
    """Does a query at position q see a key at position k of its sequence (first: is its row a prompt's)? On tensors; what is
    traced closes over numbers, not over the problem."""
    if p.mask == "full":
        return lambda q, k, first: q == q
    if p.mask == "prefix":
        return lambda q, k, first: (k <= q) | first
    if p.mask == "causal":
        return lambda q, k, first: k <= q
    if p.mask == "window":
        window, sinks = p.window, p.window_sinks
        return lambda q, k, first: (k <= q) & ((k > q - window) | (k < sinks))
    if p.mask == "chunk":
        chunk = p.chunk
        return lambda q, k, first: (k <= q) & (q // chunk == k // chunk)
    return None


def flex_mask(p: View, constant: Callable[[Any], Any]) -> Callable[..., Any]:
    """mask_mod(b, h, q_idx, kv_idx) of a shared prompt, over packed rows: by a formula, or from all pairs where a mask has
    none."""
    position, owner, root, limit = (np.zeros(p.tq, np.int32) for _ in range(4))
    key_owner, key_position = (np.zeros(p.tk, np.int32) for _ in range(2))
    is_root = np.zeros(p.tq, np.bool_)
    for s in p.segments:
        rows, keys = slice(s.q_start, s.q_start + s.q_len), slice(s.k_start, s.k_start + s.k_len)
        position[rows], owner[rows] = s.context + np.arange(s.q_len), s.index
        root[rows] = s.parent if s.parent >= 0 else s.index
        limit[rows], is_root[rows] = s.context, s.depth == 0
        key_owner[keys] = s.index
        key_position[keys] = s.context + np.arange(s.k_len)
    pos, own, top, lim, first = map(constant, (position, owner, root, limit, is_root))
    kown, kpos = constant(key_owner), constant(key_position)
    formula = _formula(p)
    seen: Any = None
    if formula is None:
        pairs = np.zeros((p.tq, p.tk), np.bool_)
        for s in p.segments:
            pairs[p.query_rows(s)[:, None], p.key_rows(s)[None, :]] = p.visible(s)
        seen = constant(pairs)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        if formula is None:
            return seen[q, k]
        mine = (kown[k] == own[q]) | ((kown[k] == top[q]) & (kpos[k] < lim[q]))
        return mine & formula(pos[q], kpos[k], first[q])

    mask_mod.positions = pos, kpos  # type: ignore[attr-defined]
    return mask_mod


def _flex_score(p: View, mask_mod: Any, constant: Callable[[Any], Any]) -> Any:
    """score_mod(score, b, h, q_idx, kv_idx), closing over no more than this problem needs; None: none needed."""
    if not p.softcap and p.alibi_slopes is None:
        return None
    import torch

    cap = p.softcap
    if p.alibi_slopes is None:
        return lambda score, b, h, q, k: cap * torch.tanh(score / cap)
    pos, kpos = mask_mod.positions
    slopes = constant(p.alibi_slopes)
    if not cap:
        return lambda score, b, h, q, k: score - slopes[h] * (pos[q] - kpos[k]).abs()
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap) - slopes[h] * (pos[q] - kpos[k]).abs()


FLEX_BLOCK = 128
FLEX_PAIRS = 2**28  # pairs of an array of them


def flex_blocks(mask_mod: Any, rows: int, keys: int, device: str, pairs: int = FLEX_PAIRS) -> Any:
    """The BlockMask that create_block_mask makes, some rows at a time: neither an array of all pairs nor a compilation (which
    takes half a minute for each process)."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    b, n_keys = FLEX_BLOCK, -(-keys // FLEX_BLOCK)
    step = max(pairs // (n_keys * b), 1) // b * b or b
    k = torch.arange(keys, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    counts = []
    for first in range(0, rows, step):
        q = torch.arange(first, min(first + step, rows), device=device)
        seen = mask_mod(zero, zero, q[:, None], k[None, :]).expand(len(q), keys)
        seen = torch.nn.functional.pad(seen, (0, n_keys * b - keys, 0, -len(q) % b))
        counts.append(seen.view(-1, b, n_keys, b).sum(dim=(1, 3)))
    count = torch.cat(counts)[None, None]
    whole = count == b * b
    args: list[Any] = []
    for blocks in ((count > 0) & ~whole, whole):
        order = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
        args += [blocks.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)]
    return BlockMask.from_kv_blocks(args[0], args[1], args[2], args[3], BLOCK_SIZE=b, mask_mod=mask_mod, seq_lengths=(rows, keys))


def _flex_calls(setting: Setting, p: View) -> Iterator[Call]:
    from torch.nn.attention.flex_attention import create_block_mask

    device = setting.arrays.device
    mask_mod = flex_mask(p, setting.arrays.constant)
    if p.tq and p.tk:
        large = p.tq * p.tk > FLEX_PAIRS
        mask = (flex_blocks(mask_mod, p.tq, p.tk, device) if large else
                create_block_mask(mask_mod, None, None, p.tq, p.tk, device=device))
        yield Call(None, (None,),
                   {"block_mask": mask, "score_mod": _flex_score(p, mask_mod, setting.arrays.constant),
                    "scale": p.scale, "enable_gqa": p.hq != p.hkv, "return_lse": setting.lse}, heads_first=True)


# ---- the table ----


def _never(setting: Setting, p: View) -> str | None:
    return None


def _nothing(setting: Setting, p: View) -> dict[str, str]:
    return {}


def _packed_needs(setting: Setting, p: View) -> dict[str, str]:
    return {"sink": "a sink logit"} if p.sink else {}


TABLE = {
    "packed": Convention(_never, _packed_needs, _packed_calls, always=("problem",)),
    "flash-varlen": Convention(_varlen_refuses, _varlen_needs, _varlen_calls, always=("cu_seqlens_q", "cu_seqlens_k")),
    "flash-dualkv": Convention(_dualkv_refuses, _varlen_needs, _dualkv_calls,
                               always=("cu_seqlens_q", "cu_seqlens_context", "cu_seqlens_decoded", "group")),
    "sdpa": Convention(_never, _sdpa_needs, _sdpa_calls, alone=True),
    "flex": Convention(_flex_refuses, _flex_needs, _flex_calls, always=("block_mask",), torch_only=True),
    "prefix-grouper": Convention(_grouper_refuses, _sdpa_needs, _sdpa_calls),
    "cascade": Convention(_cascade_refuses, _cascade_needs, _cascade_calls, always=("is_causal",), merges=True),
}


@dataclass(frozen=True)
class Name:
    """A line of conventions.txt."""

    name: str
    layout: str
    lse: bool
    doc: str


def names() -> list[Name]:
    """The conventions, in order."""
    out = []
    for line in (Path(__file__).parent / "conventions.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, layout, default, doc = (w.strip() for w in line.split("|", 3))
            out.append(Name(name, layout, default == "lse", doc))
    return out
