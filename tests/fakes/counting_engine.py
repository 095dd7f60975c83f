"""An engine without a model: answers are counted numbers; prompts choose how it misbehaves."""

from __future__ import annotations

import hashlib
import os
import time

from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.process.engine_messages import EngineInfo, EngineStats
from trencadis.core.request import Delta

HELD = "held:"
"""A model that loads until the file behind it is there."""
REFUSE, CRASH, SLOW, DIGEST, HANG, WORDS, STUCK = 9001, 9002, 9003, 9004, 9005, 9006, 9007


class CountingEngine:
    """Each step gives every runnable request one token, ``max_tokens`` in all; the first token of a request with media
    waits for all of it and DIGEST requests answer with the bytes of its hash; WORDS requests with those of the
    vocabulary's hash, and with the number of vocabularies sent."""

    def __init__(self):
        self.requests, self.made, self.pixels, self.wanted, self.out = {}, {}, {}, [], []
        self.steps = 0
        self.refetch = set()
        self.words, self.wordings = b"", 0

    @classmethod
    def create(cls, config, progress):
        if config.model == "missing":
            raise StartupError("There is no such model.")
        if config.model == "crash":
            raise RuntimeError("broken weights")
        if config.model == "slow":
            time.sleep(1.0)
        while config.model.startswith(HELD) and not os.path.exists(config.model.removeprefix(HELD)):
            time.sleep(0.01)
        progress("weights", "half", 0.5)
        return cls()

    def info(self):
        return EngineInfo("fake", "float32", 4096, 16, 512, 100, 0)

    def add(self, request):
        if request.tokens[0] == REFUSE:
            raise BadRequest("no such thing", param="tokens")
        if request.tokens[0] == STUCK:
            time.sleep(600)
        self.requests[request.id] = request
        for choice in range(request.params.n):
            self.made[request.id, choice] = 0
        self.wanted += [(request.id, i) for i in range(len(request.spans))]

    def save(self):
        pass

    def set_vocabulary(self, data):
        self.words = hashlib.sha256(data).digest()
        self.wordings += 1

    def abort(self, id, choice=-1):
        for key in [k for k in self.made if k[0] == id and choice in (-1, k[1])]:
            del self.made[key]

    def add_media(self, id, index, pixels):
        self.pixels[id, index] = hashlib.sha256(pixels.tobytes()).digest()
        request = self.requests.get(id)
        if request is not None and request.salt == "again" and (id, index) not in self.refetch:
            self.refetch.add((id, index))
            del self.pixels[id, index]
            self.wanted.append((id, index))

    def media_failed(self, id, index, status, message):
        for key in [k for k in self.made if k[0] == id]:
            del self.made[key]
            self.out.append(Delta(id, key[1], finish="error", status=status, message=message))

    def runnable(self):
        return [
            k for k in self.made
            if all((k[0], i) in self.pixels for i in range(len(self.requests[k[0]].spans)))
        ]  # fmt: skip

    def busy(self):
        return bool(self.out or self.runnable())

    def needs(self):
        wanted, self.wanted = self.wanted, []
        return wanted

    def step(self):
        out, self.out = self.out, []
        keys = self.runnable()
        self.steps += bool(keys)
        for key in keys:
            request = self.requests[key[0]]
            kind = request.tokens[0]
            if kind == CRASH:
                os.kill(os.getpid(), 9)
            if kind == HANG:
                time.sleep(600)
            if kind == SLOW:
                time.sleep(0.02)
            answer = list(b"".join(self.pixels[key[0], i] for i in range(len(request.spans))))
            if kind == WORDS:
                kind, answer = DIGEST, [*self.words, self.wordings]
            token = answer[self.made[key]] if kind == DIGEST else self.made[key]
            self.made[key] += 1
            done = self.made[key] >= request.params.max_tokens
            out.append(Delta(key[0], key[1], [token], finish="length" if done else None))
            if done:
                del self.made[key]
        return out

    def stats(self):
        return EngineStats(running=len(self.made), steps=self.steps, kv_total=512)
