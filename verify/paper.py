#!/usr/bin/env python3
"""paper.py: lines of `paper` judged with PyTorch's kernels, several cases side by side on all GPUs, within time and memory.

    python3 verify/paper.py PROGRAM OUT [--seconds 400] [--table FILE] [--done FILE...]

Each case is one `PROGRAM check LINE --kernel SPEC --arithmetic NAME --oracle cuda`. OUT/paper.jsonl gets its record as it
ends, OUT/paper.txt what it said. Pairs of kernel and line that a record there, or in a --done FILE, has judged are left
out, so that an interrupted campaign goes on (a killed one, too; one at a time in OUT); a case that ended for want of memory is tried once more, when nothing runs
beside it. SIGTERM, SIGINT and the time's end keep what is there. A table comes last, and what is left.

A case starts where it is expected to end in time (--seconds; the first ones always), where the host has the memory that
verify/memory.c counts, and a GPU what the kernel's buffers (twice, while they are moved) and the oracle take: four
doubles an output, and 6 GiB for each of four KV heads at 90112 tokens.

    --table FILE   rows `SPEC ARITHMETIC LAYOUT LINE`, tabs between, LAYOUT packed or replicated, most valuable first;
                   # begins a comment (default: the five shapes, normal and aligned, by the four kernels)
    --host GIB     of host memory to be taken (default: what is free)
    --lanes N      cases at a time on one GPU (default 3)
    --oracle WORD  as `check` takes it (default cuda)

Exit: 0 all pairs judged, 1 one of them with a defect, 2 a wrong table, file or option, 3 some are left.
"""

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHAPES = ["4096+28x2048", "8192+32x1024", "16384+28x2048", "32768+16x2048", "32768+28x2048"]
KERNELS = [
    ("torch_sdpa.py:flash", "partials", "replicated"),
    ("torch_sdpa.py:cudnn", "scaled-partials", "replicated"),
    ("torch_flex.py:attention", "flash", "packed"),
    ("torch_grouper.py:flash", "copies", "packed"),
]
JUDGED = {"PASSED", "FAILED", "IMPRECISE", "BIASED", "NONDETERMINISTIC", "OUT_OF_BOUNDS", "UNWRITTEN", "INPUT_MUTATED",
          "LEAKED", "INCONCLUSIVE", "UNSUPPORTED"}
MEMORY = re.compile(r"out of memory|GiB are free|are free$|cannot allocate", re.I)
ENDING = 6  # seconds that the table and the killing are given
GIB = 2.0**30


class Wrong(Exception):
    """A mistake of whoever called: one line."""


class Job:
    """A kernel on a line: what it needs (GiB of host and device, seconds)."""

    def __init__(self, spec, arithmetic, layout, line):
        self.spec, self.arithmetic, self.layout, self.line = spec, arithmetic, layout, line
        self.name = spec.rsplit("/", 1)[-1]
        self.tries, self.alone = 0, False
        self.host, self.device, self.seconds = self.count()

    def count(self):
        """From the line alone; another than P+NxR of one group, or none of heads and dim, is a mistake."""
        words = dict(w.split("=", 1) for w in self.line.split() if "=" in w)
        shape = re.fullmatch(r"([0-9]{1,12})\+([0-9]{1,12})x([0-9]{1,12})", words.get("shape", ""))
        heads = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", words.get("heads", "1:1"))
        dim = re.fullmatch(r"[0-9]{1,3}", words.get("dim", "64"))
        if not shape or not heads or not dim:
            raise Wrong(f"'{self.line[:80]}': shape=P+NxR, heads=Q:KV and dim=D are right")
        p, n, r = map(int, shape.groups())
        hq, hkv, d = int(heads[1]), int(heads[2]), int(dim[0])
        packed, replicated = p + n * r, self.layout == "replicated"
        rows = p + n * (p + r) if replicated else packed
        outputs = 8 * packed * (2 * hq * d + 2 * hkv * d + hq)
        inputs = 2 * packed * 2 * (hq * d + hkv * d)
        arena = rows * (2 * 2 * 2 * (hq + hkv) * d + 4 * hq)
        answer, question = 4 * outputs, inputs + packed * hq * (2 * d + 4)
        later = outputs + inputs > answer / 2
        host = inputs + arena + question + GIB + (3 if later else 2) * outputs + (answer / 2 + inputs if later else answer)
        oracle = answer + question + 4 * 6 * GIB * packed / 90112 * hq * d / 4096
        pairs = p * p / 2 + n * (r * p + r * r / 2)
        return host / GIB, (arena + max(arena, oracle) + 3 * GIB) / GIB, 20 + pairs * hq * d * 14 / 2.5e12 + host / GIB * 0.3

    def key(self):
        return self.name, self.line


def standard_jobs():
    lines = [f"shape={s} heads=32:8 dim=128{fill}" for fill in ("", " fill=aligned") for s in SHAPES]
    at = os.path.relpath(HERE / "examples")
    return [Job(f"{at}/{k[0]}", k[1], k[2], line) for line in reversed(lines) for k in KERNELS]


def read_table(path):
    jobs = []
    for number, row in enumerate(read_text(path).splitlines(), 1):
        if not row.strip() or row.startswith("#"):
            continue
        words = row.split("\t")
        if len(words) != 4 or words[2] not in ("packed", "replicated"):
            raise Wrong(f"{path}:{number}: SPEC, ARITHMETIC, packed or replicated, and LINE are right, tabs between")
        try:
            jobs.append(Job(*(w.strip() for w in words)))
        except Wrong as e:
            raise Wrong(f"{path}:{number}: {e}") from None
    if not jobs:
        raise Wrong(f"{path}: no row")
    return jobs


def read_text(path):
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise Wrong(f"{path}: {e.strerror}") from None


def read_records(path):
    """Rows of a file and the records in them, without a cut last row, and without what is none."""
    for row in read_text(path).splitlines():
        try:
            r = json.loads(row)
        except ValueError:
            continue
        if isinstance(r, dict) and isinstance(r.get("line"), str) and isinstance(r.get("kernel"), str):
            yield row, r


def judged(files):
    """(name of the kernel's file and function, line) of what is judged, the line as it was given, too; the folder of the
    kernel's file does not count."""
    out = set()
    for path in files:
        for _, r in read_records(path):
            if str(r.get("status")) in JUDGED:
                given = re.match(r"dualkv check '([^']*)'", str(r.get("command")))
                out.update((r["kernel"].rsplit("/", 1)[-1], line) for line in (r["line"], given[1] if given else r["line"]))
    return out


def number(x):
    return x if isinstance(x, (int, float)) else float("nan")


def objects(x):
    """Items of a JSON object that are objects, too."""
    return [(k, v) for k, v in x.items() if isinstance(v, dict)] if isinstance(x, dict) else []


def row_of(name, r):
    """A record in one line: largest err/bound and rms of the residual to the twin by tensor, seconds by phase."""
    ratios = " ".join(f"{k} {number(v.get('max_bound_ratio')):.2f}" + (f"/{number(v['twin_rms']):.2f}" if "twin_rms" in v else "")
                      for k, v in objects(r.get("tensors")))
    timed = r.get("phases") if isinstance(r.get("phases"), dict) else {}
    phases = " ".join(f"{k[:3]} {v:.0f}" for k, v in timed.items() if number(v) >= 0.5)
    row = (f"{name.removeprefix('torch_'):15.15} {r['line'][6:19]:13} {'al' if 'aligned' in r['line'] else '  '} {str(r.get('status')):8} "
           f"{number(r.get('seconds')):4.0f} s, gpu {number(r.get('oracle_device_seconds', 0)):4.1f}; {ratios} | {phases}")
    return row + ("" if r.get("status") == "PASSED" else " | " + str(r.get("why"))[:160])


def append(path):
    """Goes on after the last whole row: one that was cut stays a row of its own."""
    f = open(path, "ab+")
    if f.tell() and os.pread(f.fileno(), 1, f.tell() - 1) != b"\n":
        f.write(b"\n")
    f.close()
    return open(path, "a", buffering=1, encoding="utf-8", errors="replace")


def take(out):
    """The folder, for this campaign alone while it runs. What one that was killed left of its last cases is gathered."""
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / "lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Wrong(f"{out}: another campaign is running there") from None
    left = sorted(out.glob("run-*.jsonl"))
    rows = [row for path in left for row, _ in read_records(path)]
    if rows:
        with append(out / "paper.jsonl") as f:
            f.writelines(row + "\n" for row in rows)
    for path in left + list(out.glob("run-*.txt")):
        path.unlink(missing_ok=True)
    return lock


class Campaign:
    """Jobs that wait, run, and have ended."""

    def __init__(self, options, jobs):
        self.o, self.queue, self.running, self.rows = options, jobs, [], []
        self.start, self.defects, self.ending, self.serial = time.monotonic(), 0, False, 0
        self.gpus = count_gpus()
        self.host = options.host if options.host else free_memory()
        self.records, self.words = append(options.out / "paper.jsonl"), append(options.out / "paper.txt")

    def now(self):
        return time.monotonic() - self.start

    def say(self, text):
        print(f"{self.now():6.1f} {text}", flush=True)

    def fits(self, job, gpu):
        mine = [r for r in self.running if r["gpu"] == gpu]
        if not self.running and self.now() < 1:
            return True
        if self.now() + job.seconds > self.o.seconds or len(mine) >= self.o.lanes:
            return False
        if not self.running:
            return True  # alone: nothing would ever make more room
        return (not job.alone and not any(r["job"].alone for r in self.running)
                and sum(r["job"].host for r in self.running) + job.host <= self.host
                and sum(r["job"].device for r in mine) + job.device <= self.o.device)

    def launch(self, job, gpu):
        at = self.o.out / f"run-{self.serial}"
        self.serial += 1
        command = [self.o.program, "check", job.line, "--kernel", job.spec, "--oracle", self.o.oracle, "--jobs", "1", "--timeout",
                   "300", "--verbose", "--json", f"{at}.jsonl"]
        if job.arithmetic != "-":
            command += ["--arithmetic", job.arithmetic]
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu)) if self.gpus else None
        job.tries += 1
        with open(f"{at}.txt", "w") as words:
            process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        self.running.append({"process": process, "job": job, "gpu": gpu, "at": at, "since": self.now()})
        self.say(f"{job.name} {job.line} on {gpu}: {job.host:.0f} GiB, {job.device:.0f} of the device")

    def collect(self, r, cut=False):
        """What a case left: its record, its words. One that found no memory waits again."""
        job, at = r["job"], r["at"]
        words = Path(f"{at}.txt").read_text(errors="replace")
        records = list(read_records(f"{at}.jsonl")) if Path(f"{at}.jsonl").exists() else []
        self.words.write(f"== {job.name} {job.line} ({self.now() - r['since']:.1f} s{', cut' if cut else ''})\n{words}\n")
        for end in (".jsonl", ".txt"):
            Path(f"{at}{end}").unlink(missing_ok=True)
        for row, x in records:
            self.records.write(row + "\n")
            self.keep(row_of(job.name, x))
            self.defects += str(x.get("status")) in JUDGED - {"PASSED", "INCONCLUSIVE", "UNSUPPORTED"}
        last = records[-1][1] if records else {}
        if str(last.get("status")) in JUDGED:
            return
        if not records:
            ended = words.strip().splitlines()[-1:] or [""]
            self.keep(f"{job.name.removeprefix('torch_'):15.15} {job.line[6:19]:13} {'cut' if cut else 'no record'} after {self.now() - r['since']:.0f} s: {ended[0][:120]}")
        if not cut and job.tries < 2 and MEMORY.search(str(last.get("why")) if records else words):
            job.alone = True
        self.queue.append(job)
        job.tries += not job.alone  # no third time

    def keep(self, row):
        self.rows.append(row)
        self.say(row)

    def run(self):
        while (any(j.tries < 2 for j in self.queue) or self.running) and not self.ending and self.now() < self.o.seconds - ENDING:
            for r in [r for r in self.running if r["process"].poll() is not None]:
                self.running.remove(r)
                self.collect(r)
            for gpu in range(max(self.gpus, 1)):
                job = next((j for j in self.queue if j.tries < 2 and self.fits(j, gpu)), None)
                if job:
                    self.queue.remove(job)
                    self.launch(job, gpu)
            if not self.running and not any(self.fits(j, 0) for j in self.queue if j.tries < 2):
                break
            time.sleep(0.2)
        self.kill()
        for r in self.running:
            self.collect(r, True)
        return self.tell()

    def kill(self):
        for r in self.running:
            r["process"].kill()
        for r in self.running:
            r["process"].wait()

    def tell(self):
        print("\n" + "\n".join(self.rows))
        for job in self.queue:
            print(f"left: {job.name} {job.line}")
        print(f"{len(self.queue)} left, {self.now():.0f} s")
        return 1 if self.defects else 3 if self.queue else 0


def count_gpus():
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    except OSError:
        return 0


def free_memory():
    """GiB; a machine whose memory grows as it is used says too little: then --host."""
    for row in read_text("/proc/meminfo").splitlines():
        if row.startswith("MemAvailable:"):
            return int(row.split()[1]) / 2**20
    return 0.0


def parse():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("program")
    a.add_argument("out", type=Path)
    a.add_argument("--seconds", type=float, default=400)
    a.add_argument("--table")
    a.add_argument("--done", nargs="*", default=[])
    a.add_argument("--host", type=float, default=0)
    a.add_argument("--device", type=float, default=134, help="GiB of one GPU (default 134, an H200's)")
    a.add_argument("--lanes", type=int, default=3)
    a.add_argument("--oracle", default="cuda")
    return a.parse_args()


def main():
    options = parse()
    try:
        if not os.access(options.program, os.X_OK):
            raise Wrong(f"{options.program}: no program")
        options.program = os.path.abspath(options.program)
        lock = take(options.out)
        own = options.out / "paper.jsonl"
        known = judged(options.done + ([own] if own.exists() else []))
        jobs = [j for j in (read_table(options.table) if options.table else standard_jobs()) if j.key() not in known]
        campaign = Campaign(options, jobs)
    except (Wrong, OSError) as e:
        print(f"paper.py: {e}", file=sys.stderr)
        return 2

    def stop(*_):
        campaign.ending = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with lock:
        try:
            return campaign.run()
        except OSError as e:  # a full disk: nothing more can be kept
            campaign.kill()
            print(f"paper.py: {e}", file=sys.stderr)
            return 3


if __name__ == "__main__":
    sys.exit(main())
