// What `InPage` of looks.py does in the page of a panel.
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
    for (const title of panel.querySelectorAll(".jupyter-widget-Collapse-header")) {
      const open = title.parentElement.matches(".jupyter-widget-Collapse-open");
      title.setAttribute("role", "button");
      title.setAttribute("aria-label", title.textContent);
      title.setAttribute("aria-expanded", open);
      title.setAttribute("data-lm-suppress-shortcuts", "true");
      title.tabIndex = 0;
      title.onkeydown = event => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        title.click();
      };
    }
  };
  const observer = new MutationObserver(set);
  const resized = new ResizeObserver(() => {
    if (!panel.clientWidth) return;
    model.set("width", panel.clientWidth);
    model.save_changes();
  });
  const begin = () => {
    panel = el.closest(".heapr-panel");
    if (!panel) { waiting = setTimeout(begin, 100); return; }
    set();
    const changes = { childList: true, subtree: true, attributeFilter: ["class"] };
    observer.observe(panel, changes);
    resized.observe(panel);
  };
  begin();
  return () => {
    clearTimeout(waiting); observer.disconnect(); resized.disconnect();
  };
}
export default { render };
