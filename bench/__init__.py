"""What ``llmctl bench`` is made of: it asks a server on purpose, and says what came of it, with what it stands on.

May import supervisor, never the reverse but inside a command. A module imports only from what stands before it here
(``tests/test_ranks.py``):

1. nouns, pure: ``workload`` (a YAML file), ``ask`` (one repetition's requests), ``sample`` (what was seen of one), ``figures`` (what is
   reckoned of samples), ``result`` (a run's file), ``llamabench`` (llama-bench's rows as one), ``trace`` (real traffic's shape)
2. decisions, pure: ``intervals`` (what repetitions say), ``sides`` (what is compared, and what differs), ``compare`` (two
   results), ``flags`` (why a figure may not be trusted), ``traffic`` (a trace of the ledger's records), ``text`` (words to a length)
3. effects: ``exchange`` (one request), ``here`` (this machine's processes), ``target`` (who is asked), ``prompts`` (a prompt by a
   server's own tokenizer), ``nvml`` (the cards meanwhile), ``gauges`` (the whole machine), ``load`` (requests, when they are due),
   ``tap`` (what llmctl is asked now, with its text)
4. ``run`` (all of it), ``columns`` (a result's table), ``show`` (on the terminal), ``chart`` (numbers as SVG), ``plots`` (those of a
   result), ``page`` (as HTML)

``workloads/`` are those that llmctl brings. ``proof/`` isn't part of it: it measures what this project promises of itself.
"""
