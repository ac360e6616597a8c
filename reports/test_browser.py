#!/usr/bin/env python3
"""The HTML report in a headless Chromium: no console message, no request beyond the page itself, every image there, nothing
wider than the window, tables and drawings named for who cannot see them. Pages that break each rule must be found.

    test_browser.py PAGE.html... [--program DUALKV] [--shots DIR]

DUALKV makes one page more, of failures, power, bench, planted faults and lines that are no records. DIR: screenshots, light, dark
and narrow.

Speaks the DevTools protocol through a pipe; needs Python and Chromium alone. Exit 0 where there is no Chromium, and says so."""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

LIMIT = 120  # seconds for one answer: machines of CI may be slow

# What a page must satisfy by itself; the reasons why it does not.
RULES = """(() => {
  const bad = [];
  for (const i of document.images) if (!i.complete || i.naturalWidth === 0) bad.push('an image does not load: ' + i.src.slice(0, 60));
  for (const s of document.querySelectorAll('svg')) {
    const b = s.getBoundingClientRect();
    const hidden = s.closest('details:not([open])');
    if (!hidden && (b.width < 50 || b.height < 20)) bad.push('a drawing has no size');
    if (s.getAttribute('role') !== 'img' || !s.getAttribute('aria-label')) bad.push('a drawing has no name');
    if (/NaN|Infinity|nan|inf\\b/.test(s.innerHTML.replace(/<title>[^]*?<.title>/g, '').replace(/>[^<]*</g, '><')))
      bad.push('a drawing has a coordinate that is none');
  }
  for (const t of document.querySelectorAll('table')) {
    if (!t.caption || !t.caption.textContent.trim()) bad.push('a table has no caption');
    if (!t.querySelector('th[scope]')) bad.push('a table has no headers');
  }
  for (const a of document.querySelectorAll('a[href^="#"]'))
    if (!document.getElementById(a.getAttribute('href').slice(1))) bad.push('a link to nowhere: ' + a.getAttribute('href'));
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) bad.push('an id twice: ' + id);
  if (!document.documentElement.lang) bad.push('no language');
  if (!document.title) bad.push('no title');
  if (document.documentElement.scrollWidth > window.innerWidth + 1)
    bad.push('wider than the window: ' + document.documentElement.scrollWidth + ' of ' + window.innerWidth);
  if (document.querySelector('script')) bad.push('a script');
  return [...new Set(bad)];
})()"""

# Words on their background, by the contrast of WCAG: at least 4.5.
CONTRAST = """(() => {
  const light = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const parse = s => s.match(/[\\d.]+/g).map(Number);
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  const bad = new Set();
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('svg') || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const a = light(parse(getComputedStyle(e).color).slice(0, 3)), b = light(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.add('faint words: ' + e.tagName + ' ' + ratio.toFixed(1));
  }
  return [...bad];
})()"""


class Browser:
    def __init__(self, program: str, sandbox: bool) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="dualkv-browser-")
        there, here = os.pipe(), os.pipe()  # to it, from it

        def wire() -> None:
            ends = [os.dup(there[0]), os.dup(here[1])]  # 3 and 4 may be among the pipes
            high = [os.dup2(e, 100 + i) for i, e in enumerate(ends)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        words = [program, "--headless=new", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars", "--no-first-run",
                 "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={self.profile.name}",
                 "about:blank"]
        if not sandbox:
            words.insert(1, "--no-sandbox")
        self.process = subprocess.Popen(words, preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(there[0])
        os.close(here[1])
        self.write, self.read, self.rest, self.last, self.events = there[1], here[0], b"", 0, []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def message(self, until: float) -> dict | None:
        """The next message, None where none comes before `until`."""
        while b"\0" not in self.rest:
            if not select.select([self.read], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            more = os.read(self.read, 1 << 20)
            if not more:
                raise RuntimeError("Chromium ended")
            self.rest += more
        one, self.rest = self.rest.split(b"\0", 1)
        return json.loads(one)

    def ask(self, method: str, **params: object) -> dict:
        self.last += 1
        request = {"id": self.last, "method": method, "params": params}
        if getattr(self, "session", None):
            request["sessionId"] = self.session
        os.write(self.write, json.dumps(request).encode() + b"\0")
        until = time.monotonic() + LIMIT
        while (m := self.message(until)) is not None:
            if m.get("id") == self.last:
                if "error" in m:
                    raise RuntimeError(f"{method}: {m['error']}")
                return m["result"]
            self.events.append(m)
        raise RuntimeError(f"{method}: no answer within {LIMIT} s")

    def wait(self, method: str) -> None:
        until = time.monotonic() + LIMIT
        while not any(e.get("method") == method for e in self.events):
            m = self.message(until)
            if m is None:
                raise RuntimeError(f"{method} did not come within {LIMIT} s")
            self.events.append(m)

    def value(self, expression: str) -> list:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def window(self, width: int, dark: bool) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, page: pathlib.Path) -> list[str]:
        """Loads it; what it said and asked for."""
        self.events = []
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.wait("Page.loadEventFired")
        self.value("new Promise(r => setTimeout(r, 300)) && []")
        end = time.monotonic() + 0.3  # what comes late
        while (m := self.message(end)) is not None:
            self.events.append(m)
        bad = []
        for e in self.events:
            method, p = e.get("method"), e.get("params", {})
            if method == "Runtime.consoleAPICalled":
                bad.append(f"console: {p['type']}")
            elif method == "Runtime.exceptionThrown":
                bad.append("console: exception")
            elif method == "Log.entryAdded":
                bad.append(f"log: {p['entry']['text'][:160]}")
            elif method == "Network.requestWillBeSent":
                url = p["request"]["url"]
                if url != page.resolve().as_uri() and not url.startswith("data:"):
                    bad.append(f"request: {url[:100]}")
        return bad

    def shot(self, path: pathlib.Path, most: int) -> None:
        """The page from its top, at most so many pixels of it."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.session = None
        try:
            self.ask("Browser.close")
        except (RuntimeError, OSError):
            self.process.kill()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for fd in (self.write, self.read):
            os.close(fd)
        self.profile.cleanup()


def start(program: str) -> Browser:
    """With its sandbox where it can have one: not as root, nor where user namespaces are forbidden."""
    if os.geteuid() != 0:
        try:
            return Browser(program, True)
        except (RuntimeError, OSError):
            print("Chromium does not start in its sandbox: without")
    return Browser(program, False)


def judge(browser: Browser, page: pathlib.Path, shots: pathlib.Path | None = None) -> list[str]:
    bad: list[str] = []
    for name, width, dark in (("light", 1100, False), ("dark", 1100, True), ("narrow", 380, False)):
        browser.window(width, dark)
        found = browser.open(page) + browser.value(RULES) + browser.value(CONTRAST)
        bad += [f"{name}: {f}" for f in found]
        if shots:
            browser.shot(shots / f"{page.stem}-{name}.png", 6000)
    return bad


BROKEN = {  # what is put behind <body>, and what must be said of it
    "an image from a network": ('<img alt="" src="https://example.invalid/x.png">', "log: "),
    "an image that is none": ('<img alt="" src="data:image/png;base64,AAAA">', "an image does not load"),
    "a script": ("<script>console.error('x')</script>", "a script"),
    "a style from a network": ('<link rel="stylesheet" href="https://example.invalid/x.css">', "log: "),
    "a table without a caption": ("<table><tr><td>x</td></tr></table>", "a table has no caption"),
    "a drawing without a name": ('<svg width="100" height="100"></svg>', "a drawing has no name"),
    "words too wide": ('<div style="width:3000px">x</div>', "wider than the window"),
    "faint words": ('<p style="color:#888;background:#999">x</p>', "faint words"),
    "a link to nowhere": ('<a href="#nowhere">x</a>', "a link to nowhere"),
}
BARE = {  # the same on a page without a policy: the requests and messages themselves are seen
    "console": ("<script>console.error('x')</script>", "console: error"),
    "exception": ("<script>throw new Error('x')</script>", "console: exception"),
    "request": ('<img alt="" src="https://example.invalid/x.png">', "request: https://example.invalid/x.png"),
}


def prove(browser: Browser, page: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """That each rule can be broken."""
    text, missed = page.read_text(encoding="utf-8"), []
    assert "<body>" in text
    broken = folder / "broken.html"
    browser.window(1100, False)
    for name, (added, said) in list(BROKEN.items()) + list(BARE.items()):
        body = "<!DOCTYPE html><html lang=en><title>x</title><body>" + added if name in BARE else text.replace("<body>", "<body>" + added, 1)
        broken.write_text(body, encoding="utf-8")
        found = browser.open(broken) + browser.value(RULES) + browser.value(CONTRAST)
        if not any(said in f for f in found):
            missed.append(f"{name} was not found: {found}")
    return missed


HOSTILE = (b'{"line":"shape=9","kernel":"<script>alert(1)</script>","status":"FAILED","why":"</p><img src=x onerror=alert(1)>",'
           b'"commit":"<b>","tensors":{"O":{"max_bound_ratio":1e999,"twin_rms":"nan"}}}\n'
           b'{"line":"shape=9","status":"PAS\n\xff\xfe\n' + b"[" * 5000 + b"\n")


def everything(program: str, folder: pathlib.Path) -> pathlib.Path:
    """A page of all kinds of records."""
    records, hostile, page = folder / "records.jsonl", folder / "hostile.jsonl", folder / "everything.html"
    measured = pathlib.Path(__file__).parent.parent / "data" / "measurements"
    run = subprocess.run([program, "check", "smoke", "--kernel", "emu", "--kernel", "emu+fault=B3", "--quiet", "--json", records],
                         stdout=subprocess.DEVNULL)
    assert run.returncode == 1, f"a planted fault in smoke: exit {run.returncode}"
    hostile.write_bytes(HOSTILE)
    subprocess.run([program, "report", "--html", page, records, hostile, measured / "nvidia-h200" / "bench-cuda.jsonl",
                    measured / "cpu" / "power.jsonl"], check=True, stderr=subprocess.DEVNULL)
    return page


def option(words: list[str], name: str) -> str | None:
    if name not in words:
        return None
    at = words.index(name)
    value = words[at + 1]
    del words[at:at + 2]
    return value


def main(words: list[str]) -> int:
    folder, dualkv = option(words, "--shots"), option(words, "--program")
    shots = pathlib.Path(folder) if folder else None
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
    program = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    if not program:
        print("no Chromium: the HTML report was not opened in a browser (everything else was tested)")
        return 0
    failed = 0
    made = tempfile.TemporaryDirectory(prefix="dualkv-browser-")
    pages = [pathlib.Path(w) for w in words]
    if dualkv:
        pages.append(everything(dualkv, pathlib.Path(made.name)))
    browser = start(program)
    try:
        for page in pages:
            bad = judge(browser, page, shots)
            failed += bool(bad)
            print(f"{'FAIL' if bad else 'ok'}  {page} ({page.stat().st_size} bytes)")
            for b in bad[:20]:
                print(f"  {b}")
        missed = prove(browser, pages[0], pathlib.Path(made.name))
        failed += len(missed)
        for m in missed:
            print(f"FAIL  {m}")
        print(f"{len(BROKEN) + len(BARE) - len(missed)} of {len(BROKEN) + len(BARE)} broken pages were found")
    finally:
        browser.close()
        made.cleanup()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
