"""llmctl: plan, launch, watch and meter stock llama.cpp servers on one home box.

The package is flat and lies in ranks; a module imports only from ranks above its own, or from what stands
before it in its own (``tests/test_ranks.py``):

0. words: ``errors``, ``units``, ``paths``
1. nouns, a frozen value and its one reader: ``preset``, ``hardware``, ``gguf``, ``engine``, ``recipe``
2. decisions, pure, no I/O, time is an argument: ``argv`` (the flags), ``lifecycle`` (states, exit causes, restarts), ``admission``,
   ``ask``, ``gate``, ``sse``, ``meter`` (tokens), ``assemble``
3. effects, one outside thing each: ``pip``, ``source``, ``toolkit``, ``toolchain``, ``launcher``, ``build``, ``store``, ``child``,
   ``upstream``, ``ledger``, ``rundir``
4. wiring: ``connection`` (one client), ``arbiter`` (the children), ``reply`` (one answer), ``proxy`` (one request), ``control`` (our own
   routes), ``app``, ``serve``
5. edge: ``cli``, ``render``, ``docs``, ``commands/``: parse, call, print, exit code
"""

__version__ = "0.1.0"
