"""Names of choices: recipes, recipes with an ending that changes something, baselines, and methods with local steps.

| ending | changes |
| --- | --- |
| `-nofeedback` | no error feedback, to show what it is for |
| `-momentum` | DGC's momentum correction instead of the optimizer's momentum |
| `-nomomentum` | no momentum, at the learning rate that momentum amounts to |
| `-lazy` | `LazyAdam`: Adam with per-entry step counts |
| `-updates` | exchanges the optimizer's updates instead of gradients |
| `-updates-H` | exchanges the updates of H local steps |

`diloco-H`, `local-adam-H` and `sparseloco-H` are published methods with H local steps.
"""

from __future__ import annotations

from gradsieve.lab.baselines import BASELINES
from gradsieve.recipes import RECIPES
from gradsieve.registry import Registry
from gradsieve.updates import DILOCO, SPARSELOCO, Outer

DENSE = "dense"
ONEBIT = "onebit"
WITHOUT_FEEDBACK = "-nofeedback"
CORRECTED = "-momentum"
WITHOUT_MOMENTUM = "-nomomentum"
LAZY = "-lazy"
UPDATES = "-updates"
ENDINGS = (WITHOUT_FEEDBACK, CORRECTED, WITHOUT_MOMENTUM, LAZY, UPDATES)
DENSE_ENDINGS = (WITHOUT_MOMENTUM, LAZY)
DENSE_NAMES = (DENSE, *(DENSE + ending for ending in DENSE_ENDINGS))

LOCAL_STEPS = (2, 4, 8, 16, 32, 64, 128)
DENSE_LOCAL: dict[str, Outer] = {
    **{f"diloco-{steps}": DILOCO.every(steps) for steps in LOCAL_STEPS},
    **{f"local-adam-{steps}": Outer(local_steps=steps) for steps in LOCAL_STEPS},
}
"""Baselines that average models densely after local steps. Their optimizer is the unchanged one."""
SPARSELOCO_LOCAL = {f"sparseloco-{steps}": SPARSELOCO.every(steps) for steps in LOCAL_STEPS}
"""SparseLoCo as published. Its optimizer is the unchanged one, too."""
SPARSELOCO_DENSITY = 1 / 64
RECIPES_LOCAL: dict[str, Outer] = {
    f"{name}{UPDATES}-{steps}": Outer(local_steps=steps) for name in RECIPES if name != DENSE for steps in LOCAL_STEPS
}
"""Recipes that exchange the updates of several local steps."""
OUTERS = DENSE_LOCAL | SPARSELOCO_LOCAL | RECIPES_LOCAL

BASE_RECIPES: Registry[str] = Registry(
    "recipe",
    {
        **{name: name for name in RECIPES},
        **{f"{name}{ending}": name for name in RECIPES for ending in ENDINGS if name != DENSE},
        **{f"{DENSE}{ending}": DENSE for ending in DENSE_ENDINGS},
        **{name: DENSE for name in BASELINES if name != "ddp"},  # ddp is dense
        **dict.fromkeys(DENSE_LOCAL, DENSE),
        **dict.fromkeys(SPARSELOCO_LOCAL, "sparseloco"),
        **{name: name.partition(UPDATES)[0] for name in RECIPES_LOCAL},
    },
)
"""The library's recipe behind the name of every choice."""
