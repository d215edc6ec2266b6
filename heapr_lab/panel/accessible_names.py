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
  const set = (panel) => {
    for (const [place, name] of Object.entries(model.get("names"))) {
      for (const found of panel.querySelectorAll(place)) {
        found.setAttribute(found.tagName === "IMG" ? "alt" : "aria-label", name);
      }
    }
  };
  const observer = new MutationObserver(() => set(el.closest(".heapr-panel")));
  let waiting;
  const begin = () => {
    const panel = el.closest(".heapr-panel");
    if (!panel) { waiting = setTimeout(begin, 100); return; }
    set(panel);
    observer.observe(panel, { childList: true, subtree: true });
  };
  begin();
  return () => { clearTimeout(waiting); observer.disconnect(); };
}
export default { render };
"""


class AccessibleNames(anywidget.AnyWidget):
    """Sets the names of elements in the panel around it, now and when they are new."""

    _esm = _SCRIPT

    names = traitlets.Dict().tag(sync=True)
    """By a CSS selector: the `alt` of pictures, the `aria-label` of all else."""
