"""Names of what has none in ipywidgets: handles of sliders, and pictures.

A screen reader says them; the script in the page sets them. Without torch.
"""

from typing import Final

import anywidget
import traitlets

PANEL: Final = "heapr-panel"
"""The class of a panel, in which names are set."""

_SCRIPT: Final = """
function render({ model, el }) {
  let panel = null, waiting;
  const set = () => {
    for (const slider of panel.querySelectorAll(".widget-slider")) {
      const label = slider.querySelector(".widget-label").textContent;
      slider.querySelector("[role=slider]")?.setAttribute("aria-label", label);
    }
    for (const [place, name] of Object.entries(model.get("pictures"))) {
      for (const picture of panel.querySelectorAll(place)) picture.alt = name;
    }
  };
  const observer = new MutationObserver(set);
  const begin = () => {
    panel = el.closest(".heapr-panel");
    if (!panel) { waiting = setTimeout(begin, 100); return; }
    set();
    observer.observe(panel, { childList: true, subtree: true });
  };
  begin();
  return () => { clearTimeout(waiting); observer.disconnect(); };
}
export default { render };
"""


class AccessibleNames(anywidget.AnyWidget):
    """Names pictures, and handles by the labels of their sliders, in its panel."""

    _esm = _SCRIPT

    pictures = traitlets.Dict().tag(sync=True)
    """By a CSS selector, the name of a picture."""
