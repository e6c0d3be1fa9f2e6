"""For tests of gw.jax: ranks are threads, which must not wait for each other in JAX's own pool of a few threads."""

from __future__ import annotations

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)
