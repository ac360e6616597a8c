"""Gemma-3 from a GGUF file, in NumPy: container, dequantisation, tokenizer, forward pass.

Written from the public descriptions of the GGUF v3 container, of its block formats and of the Gemma-3
decoder. Only what record_activations.py needs: float32, one sequence at a time, a key/value cache.
"""

import re
import struct

import numpy as np


class ModelError(Exception):
    """The model file is not what this reader understands; the message is one line."""


# --- container ------------------------------------------------------------------------------------

GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_STRING, GGUF_ARRAY = 8, 9


class Cursor:
    """Reads little-endian fields off a bytes-like object; running off the end is a ModelError."""

    def __init__(self, data):
        self.data, self.pos = data, 0

    def take(self, n):
        if n > len(self.data) - self.pos:
            raise ModelError(f"gguf: {n} bytes wanted at offset {self.pos}, the file ends before that")
        self.pos += n
        return self.data[self.pos - n:self.pos]

    def scalar(self, fmt):
        return struct.unpack("<" + fmt, self.take(struct.calcsize("<" + fmt)))[0]

    def string(self):
        return bytes(self.take(self.scalar("Q"))).decode("utf-8")

    def value(self, kind):
        if kind == GGUF_STRING:
            return self.string()
        if kind == GGUF_ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in GGUF_SCALARS:
                dtype = np.dtype(GGUF_SCALARS[inner]).newbyteorder("<")
                return np.frombuffer(self.take(count * dtype.itemsize), dtype)
            return [self.value(inner) for _ in range(count)]
        if kind not in GGUF_SCALARS:
            raise ModelError(f"gguf: unknown value type {kind} at offset {self.pos}")
        return self.scalar(GGUF_SCALARS[kind])


def read_gguf(data):
    """data: the whole file. Returns (metadata dict, {name: (numpy shape, type number, raw bytes)})."""
    cur = Cursor(memoryview(data))
    if bytes(cur.take(4)) != b"GGUF":
        raise ModelError("gguf: the file does not start with 'GGUF'")
    version = cur.scalar("I")
    if version != 3:
        raise ModelError(f"gguf: version {version}, this reader knows version 3")
    tensor_count, meta_count = cur.scalar("Q"), cur.scalar("Q")
    meta = {}
    for _ in range(meta_count):
        key = cur.string()
        meta[key] = cur.value(cur.scalar("I"))
    infos = []
    for _ in range(tensor_count):
        name = cur.string()
        dims = [cur.scalar("Q") for _ in range(cur.scalar("I"))]
        infos.append((name, tuple(reversed(dims)), cur.scalar("I"), cur.scalar("Q")))
    align = meta.get("general.alignment", 32)
    base = -(-cur.pos // align) * align
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in FORMATS:
            raise ModelError(f"gguf: tensor {name} has type {kind}, no dequantiser for it")
        _, block, size, _ = FORMATS[kind]
        count = int(np.prod(shape, dtype=np.int64))
        if count % block:
            raise ModelError(f"gguf: tensor {name}: {count} values do not fill blocks of {block}")
        cur.pos = base + offset
        tensors[name] = (shape, kind, cur.take(count // block * size))
    return meta, tensors


# --- block formats: raw [n, block bytes] uint8 -> [n, values of a block] float32 --------------------

def half(raw, at):
    """The fp16 number at byte `at` of every block, as a float32 column."""
    return np.ascontiguousarray(raw[:, at:at + 2]).view("<f2").astype(np.float32)


def dequant_f32(raw):
    return raw.view("<f4")


def dequant_q5_0(raw):
    """d: fp16; 32 fifth bits; 32 low nibbles, the first 16 values in the low halves. x = d (q - 16)."""
    high = np.unpackbits(raw[:, 2:6], axis=1, bitorder="little")
    low = np.concatenate([raw[:, 6:22] & 15, raw[:, 6:22] >> 4], axis=1)
    return half(raw, 0) * ((low | high << 4).astype(np.float32) - 16)


def dequant_q8_0(raw):
    """d: fp16; 32 signed bytes. x = d q."""
    return half(raw, 0) * raw[:, 2:34].view(np.int8).astype(np.float32)


def dequant_q4_k(raw):
    """d, dmin: fp16; 8 pairs of 6-bit (scale, min) in 12 bytes; 256 nibbles. x = d scale q - dmin min.

    The first four pairs sit in the low six bits of bytes 0-3 (scales) and 4-7 (mins); the last four have
    their low nibbles in bytes 8-11 and their upper two bits on top of bytes 0-3 and 4-7.
    """
    s = raw[:, 4:16]
    scale = np.concatenate([s[:, 0:4] & 63, (s[:, 8:12] & 15) | (s[:, 0:4] >> 6) << 4], axis=1)
    least = np.concatenate([s[:, 4:8] & 63, (s[:, 8:12] >> 4) | (s[:, 4:8] >> 6) << 4], axis=1)
    qs = raw[:, 16:144].reshape(-1, 4, 32)
    q = np.stack([qs & 15, qs >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
    a = (half(raw, 0) * scale)[:, :, None]
    b = (half(raw, 2) * least)[:, :, None]
    return (a * q - b).reshape(-1, 256)


def dequant_q6_k(raw):
    """128 bytes of nibbles, 64 of upper bit pairs, 16 signed scales, d: fp16. x = d scale (q - 32).

    Each half of a block: 64 bytes of nibbles give two rows of 32 low and two of 32 high halves, and 32
    bytes give the four rows their upper two bits.
    """
    ql = raw[:, 0:128].reshape(-1, 2, 2, 32)
    qh = raw[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([ql & 15, ql >> 4], axis=2)
    high = qh >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    q = (low | high << 4).astype(np.float32) - 32
    scale = half(raw, 208) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return (q.reshape(-1, 16, 16) * scale[:, :, None]).reshape(-1, 256)


# type number: (name, values of a block, bytes of a block, dequantiser)
FORMATS = {
    0: ("F32", 1, 4, dequant_f32),
    6: ("Q5_0", 32, 22, dequant_q5_0),
    8: ("Q8_0", 32, 34, dequant_q8_0),
    12: ("Q4_K", 256, 144, dequant_q4_k),
    14: ("Q6_K", 256, 210, dequant_q6_k),
}


def dequantise(tensor):
    """One entry of read_gguf's tensors, as a float32 array of its shape."""
    shape, kind, raw = tensor
    _, block, size, unpack = FORMATS[kind]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, size)
    out = np.empty((len(blocks), block), np.float32)
    step = 1 << 16
    for i in range(0, len(blocks), step):
        out[i:i + step] = unpack(blocks[i:i + step])
    return out.reshape(shape)


# --- tokenizer ------------------------------------------------------------------------------------

TOKEN_NORMAL, TOKEN_USER, TOKEN_BYTE = 1, 4, 6
SPACE = "\u2581"


class Tokenizer:
    """SentencePiece BPE: merge the neighbours whose joint piece scores best, until no pair has a piece."""

    def __init__(self, meta):
        self.pieces = meta["tokenizer.ggml.tokens"]
        self.kinds = meta["tokenizer.ggml.token_type"]
        scores = meta["tokenizer.ggml.scores"]
        self.bos = meta["tokenizer.ggml.bos_token_id"]
        self.eos = meta["tokenizer.ggml.eos_token_id"]
        self.score = {p: s for p, s, k in zip(self.pieces, scores, self.kinds) if k == TOKEN_NORMAL}
        self.ids = {p: i for i, (p, k) in enumerate(zip(self.pieces, self.kinds))
                    if k in (TOKEN_NORMAL, TOKEN_USER, TOKEN_BYTE)}
        user = sorted((p for p, k in zip(self.pieces, self.kinds) if k == TOKEN_USER), key=len, reverse=True)
        self.user = set(user)
        self.split = re.compile("(" + "|".join(map(re.escape, user)) + ")") if user else None

    def merge(self, text):
        symbols = list(text)
        while True:
            best, where = None, -1
            for i in range(len(symbols) - 1):
                score = self.score.get(symbols[i] + symbols[i + 1])
                if score is not None and (best is None or score > best):
                    best, where = score, i
            if where < 0:
                return symbols
            symbols[where:where + 2] = [symbols[where] + symbols[where + 1]]

    def encode(self, text):
        """Token ids, without <bos>. A character that has no piece becomes its UTF-8 bytes."""
        out = []
        for part in self.split.split(text) if self.split else [text]:
            for symbol in [part] if part in self.user else self.merge(part.replace(" ", SPACE)):
                if symbol in self.ids:
                    out.append(self.ids[symbol])
                else:
                    out.extend(self.ids[f"<0x{b:02X}>"] for b in symbol.encode("utf-8"))
        return out

    def decode(self, ids):
        raw = b"".join(bytes([int(self.pieces[i][3:5], 16)]) if self.kinds[i] == TOKEN_BYTE
                       else self.pieces[i].replace(SPACE, " ").encode("utf-8") for i in ids)
        return raw.decode("utf-8", errors="replace")


# --- decoder --------------------------------------------------------------------------------------

LOCAL_ROPE_BASE = 10000.0  # sliding-window layers; the file's rope.freq_base is the full layers'
FULL_EVERY = 6             # five sliding-window layers, then one full layer


def rms_norm(x, weight, eps):
    """The GGUF converter has already added Gemma's 1 to the weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(np.float32) * (x + 0.044715 * x * x * x)))


def rope(x, positions, base):
    """x [n, heads, D]; rotates channel i with channel i + D/2 by position * base^(-2i/D)."""
    pairs = x.shape[-1] // 2
    angle = positions[:, None] * base ** (-np.arange(pairs) / pairs)
    c, s = (f(angle).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    a, b = x[..., :pairs], x[..., pairs:]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def attend(q, k, v, start, scale, window):
    """q [n, Hq, D] at positions start..; k, v [m, Hkv, D] at 0..; causal, the `window` last keys (0: all)."""
    n, hq, _ = q.shape
    m, hkv, _ = k.shape
    row, key = np.arange(start, start + n)[:, None], np.arange(m)[None, :]
    hidden = (key > row) | ((key <= row - window) if window else False)
    out = np.empty((n, hq, v.shape[-1]), np.float32)
    for h in range(hq):
        s = q[:, h] @ k[:, h // (hq // hkv)].T * np.float32(scale)
        s[hidden] = -np.inf
        p = np.exp(s - s.max(axis=1, keepdims=True))
        out[:, h] = p @ v[:, h // (hq // hkv)] / p.sum(axis=1, keepdims=True)
    return out


class Gemma3:
    def __init__(self, meta, tensors):
        if meta.get("general.architecture") != "gemma3":
            raise ModelError(f"gguf: architecture {meta.get('general.architecture')!r}, not gemma3")
        self.layers = meta["gemma3.block_count"]
        self.hq = meta["gemma3.attention.head_count"]
        self.hkv = meta["gemma3.attention.head_count_kv"]
        self.dim = meta["gemma3.attention.key_length"]
        self.eps = np.float32(meta["gemma3.attention.layer_norm_rms_epsilon"])
        self.rope_base = meta["gemma3.rope.freq_base"]
        self.sliding = meta["gemma3.attention.sliding_window"]
        self.scale = 1 / np.sqrt(self.dim)  # query_pre_attn_scalar is the head dimension in this model
        self.formats = sorted({FORMATS[kind][0] for _, kind, _ in tensors.values()})
        try:
            self.embed = dequantise(tensors["token_embd.weight"])
            self.final_norm = dequantise(tensors["output_norm.weight"])
            parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output",
                     "post_attention_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "post_ffw_norm")
            self.blocks = [{p: dequantise(tensors[f"blk.{i}.{p}.weight"]) for p in parts}
                           for i in range(self.layers)]
        except KeyError as e:
            raise ModelError(f"gguf: tensor {e} is missing") from None

    def window(self, layer):
        """Sliding window of a layer in keys; 0 where the layer sees everything."""
        return 0 if (layer + 1) % FULL_EVERY == 0 else self.sliding

    def forward(self, tokens, cache=None):
        """Runs `tokens` after the tokens of `cache` (a list of a layer's (k, v), None: an empty one).

        Returns (hidden [n, width], the new cache, a layer's (q, k, v) of these tokens after norm and RoPE).
        """
        start = len(cache[0][0]) if cache else 0
        n = len(tokens)
        pos = np.arange(start, start + n, dtype=np.float64)
        x = self.embed[tokens] * np.float32(np.sqrt(self.embed.shape[1]))
        new_cache, recorded = [], []
        for i, w in enumerate(self.blocks):
            window = self.window(i)
            base = LOCAL_ROPE_BASE if window else self.rope_base
            h = rms_norm(x, w["attn_norm"], self.eps)
            q = (h @ w["attn_q"].T).reshape(n, self.hq, self.dim)
            k = (h @ w["attn_k"].T).reshape(n, self.hkv, self.dim)
            v = (h @ w["attn_v"].T).reshape(n, self.hkv, self.dim)
            q = rope(rms_norm(q, w["attn_q_norm"], self.eps), pos, base)
            k = rope(rms_norm(k, w["attn_k_norm"], self.eps), pos, base)
            recorded.append((q, k, v))
            if cache:
                k, v = np.concatenate([cache[i][0], k]), np.concatenate([cache[i][1], v])
            new_cache.append((k, v))
            h = attend(q, k, v, start, self.scale, window).reshape(n, -1) @ w["attn_output"].T
            x = x + rms_norm(h, w["post_attention_norm"], self.eps)
            h = rms_norm(x, w["ffn_norm"], self.eps)
            h = (gelu_tanh(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
            x = x + rms_norm(h, w["post_ffw_norm"], self.eps)
        return x, new_cache, recorded

    def logits(self, hidden):
        """hidden [n, width] -> [n, vocabulary] float64; the output matrix is the embedding."""
        return (rms_norm(hidden, self.final_norm, self.eps) @ self.embed.T).astype(np.float64)
