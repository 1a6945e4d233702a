"""llmctl: plan, launch, watch and meter stock llama.cpp servers on one home box.

The package is flat and lies in ranks; a module imports only from ranks above its own, or from what stands
before it in its own (``tests/test_ranks.py``):

0. words: ``errors``, ``units``, ``paths``
1. nouns, a frozen value and its one reader.
   A preset: ``words`` (strict YAML), ``value`` (kinds of values), ``option`` (the declarations), ``model``, ``passthrough`` (extra
   arguments), ``profile`` (a file), ``rules`` (what goes together), ``sampling``, ``preset``.
   The machine: ``memory``, ``hardware``, ``cards`` (that aren't here). The engine: ``engine``, ``recipe``.
   A model file: ``ggml`` (tensor types), ``cursor`` (bounded reading), ``gguf`` (the header), ``architecture`` (its shape)
2. decisions, pure, no I/O, time is an argument.
   What fits: ``layout`` (ggml's allocator), ``graph`` (a model's compute graph), ``estimate`` (bytes a term), ``allocation`` (what the
   engine says it took), ``budget``, ``derive`` (numbers nobody wrote down), ``plan``, ``argv`` (the flags), ``warmup``.
   What happens: ``lifecycle`` (states, exit causes, restarts), ``admission``, ``ask``, ``gate``, ``sse``, ``meter`` (tokens), ``assemble``
3. effects, one outside thing each: ``pip``, ``source``, ``toolkit``, ``toolchain``, ``launcher``, ``build``, ``kept`` (small files that
   save work), ``hub`` (model repositories), ``store`` (model files), ``headers``, ``measured`` (what earlier starts took), ``phantom`` (a
   model file without weights), ``child``, ``trial`` (planned against real memory), ``pack`` (the bundle), ``upstream``, ``ledger``,
   ``rundir``
4. wiring: ``connection`` (one client), ``arbiter`` (the children), ``reply`` (one answer), ``proxy`` (one request), ``control`` (our own
   routes), ``app``, ``serve``, ``order`` (what a command line asks for)
5. edge: ``cli``, ``render``, ``planning`` (a plan on the terminal), ``docs``, ``commands/``: parse, call, print, exit code
"""

__version__ = "0.1.0"
