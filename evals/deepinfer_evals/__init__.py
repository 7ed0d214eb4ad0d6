"""Reproducible evaluations: a score that can be run again, to the bit. ``python -m deepinfer_evals COMMAND``.

inspect_ai does tasks, scorers, logs, retries and parallelism; ``datasets`` loads the rows. What they lack is here:

* a seed per sample, a function of run seed, benchmark, question id and epoch (``seeds.py``): inspect_ai gives all
  samples one seed, so that a subset or another order would be another experiment;
* token ids and hashes of the log-probabilities of every answer (``endpoint.py``, ``model_api.py``): its own providers
  drop what an OpenAI-compatible server adds to the protocol;
* a journal that is on the disk before an answer counts (``journal.py``): its logs are flushed now and then;
* the manifest (``manifest.py``), ``verify``, ``compare`` and ``doctor``.

A run is a folder: ``manifest.json``, ``prompts.jsonl``, ``answers.jsonl``, ``judgements.jsonl``, ``sessions.jsonl``,
and inspect_ai's logs in ``logs/`` for its viewer. A verdict is never stored: it is computed from the answer, so that
another grader can be tried on the same answers.

Only ``runner.py`` and ``model_api.py`` import inspect_ai, which takes seconds.
"""
