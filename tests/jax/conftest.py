"""Configuration for tests of gw.jax: synchronous dispatch, so that rank threads do not block each other's programs."""

from __future__ import annotations

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)
