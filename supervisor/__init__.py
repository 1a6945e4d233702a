"""llmctl: plan, launch, watch and meter stock llama.cpp servers on one home box.

The package is flat and lies in ranks; a module imports only from ranks above its own, or from what stands
before it in its own (``tests/test_ranks.py``):

0. words: ``errors``, ``units``, ``paths``
1. nouns, a frozen value and its one reader.
   A preset: ``words`` (strict YAML), ``value`` (kinds of values), ``option`` (the declarations), ``model``, ``passthrough`` (extra
   arguments), ``profile`` (a file), ``rules`` (what goes together), ``sampling``, ``preset``.
   The machine: ``memory``, ``hardware``, ``cards`` (that aren't here). The engine: ``engine``, ``recipe``.
   What is kept: ``config`` (the user's settings), ``record`` (of one request).
   A model file: ``ggml`` (tensor types), ``cursor`` (bounded reading), ``gguf`` (the header), ``architecture`` (its shape)
2. decisions, pure, no I/O, time is an argument.
   What fits: ``layout`` (ggml's allocator), ``graph`` (a model's compute graph), ``estimate`` (bytes a term), ``step`` (what a decode
   step reads), ``allocation`` (what the engine says it took), ``budget``, ``derive`` (numbers nobody wrote down), ``plan``, ``argv``
   (the flags), ``warmup``.
   What lives: ``lifecycle`` (states, restarts), ``causes`` (why a child ended) with its table, ``symptoms``, ``stepdown`` (what to give up
   then), ``progress`` (whether it hangs), ``suspects`` (requests that end it).
   Who runs and who waits: ``admission`` (one child's queue), ``placement`` (what gives way).
   A request: ``routes``, ``routing`` (whose it is), ``gate``, ``ask``, ``shorten`` (a dialogue without its oldest exchanges); its answer:
   ``fault`` (whose fault an error is), ``sse``, ``meter`` (tokens) and ``pace`` (gaps between them), ``assemble`` (an unstreamed answer of
   a streamed one) with ``choices``, ``messages``, ``responses``, ``native`` (each API's); ``openapi`` (our own routes).
   What comes of it: ``energy`` (whose it was), ``likeness`` (where prompts part), ``why`` (one record in words), ``speculation`` (whether
   guessing pays), ``row`` (a record in the making), ``glance`` (two looks at a running llmctl, and the rates between them)
3. effects, one outside thing each: ``pip``, ``source``, ``toolkit``, ``toolchain``, ``launcher``, ``build``, ``kept`` (small files
   that save work), ``hub`` (model repositories), ``store`` (model files), ``headers``, ``measured`` (what earlier starts took),
   ``conceded`` (what was given up), ``phantom`` (a model file without weights), ``child`` and its ``logfile``, ``scene`` (what the
   machine says of its end), ``vram`` (the card's memory by process), ``power`` (what it takes), ``trial`` (planned against real
   memory), ``speed`` (its prefill and decode), ``pack`` (the bundle), ``upstream``, ``rundir``, ``running`` (the llmctl that runs
   now, for a command).
   The books: ``schema`` (their tables), ``ledgerfile`` and ``ledger`` (who writes), ``accounts`` (who reads), ``metrics`` (Prometheus),
   ``logs``
4. wiring: ``connection`` (one client), ``line`` (who waits for a child), ``order`` (what a command line asks for), ``catalog`` (what a
   request can ask for), ``ward`` (one child and what is wanted of it), ``watch`` (looks after it), ``keeper`` (its life), ``arbiter``
   (all of them), ``reply`` (one answer), ``length`` (whether a prompt fits), ``proxy`` (one request), ``live`` (what is so now),
   ``control`` (our own routes), ``app``, ``serve``
5. edge: ``cli``, ``render``, ``following`` and ``planning`` (what runs, and a plan, on the terminal), ``measuring`` (a run of bench),
   ``dashboard`` (what is drawn of a running llmctl) and ``screen`` (a whole terminal), ``spendlog`` (a record in LiteLLM's columns),
   ``docs``, ``commands/``: parse, call, print, exit code
"""

__version__ = "0.1.0"
