// Filters and folds the tree of modules. The page can be read without it.
(function () {
  const tools = document.getElementById("tools"), tree = document.getElementById("tree");
  if (!tools || !tree) return;
  const name = tools.querySelector("[type=search]"), bad = tools.querySelector("[type=checkbox]");
  const said = tools.querySelector("output"), buttons = tools.querySelectorAll("button");
  const nodes = Array.from(tree.querySelectorAll("details"));
  let open = null; // as it was before filtering

  function filter() {
    const wanted = name.value.trim().toLowerCase(), active = wanted !== "" || bad.checked;
    if (active && open === null) open = nodes.map((node) => node.open);
    if (!active && open !== null) { nodes.forEach((node, i) => { node.open = open[i]; }); open = null; }
    let found = 0;
    nodes.forEach((node) => { node.hidden = active; });
    if (active) nodes.forEach((node) => {
      if (bad.checked && !node.classList.contains("bad")) return;
      if (!node.dataset.name.toLowerCase().includes(wanted)) return;
      found += 1;
      node.hidden = false;
      for (let up = node.parentElement; up !== tree; up = up.parentElement) { up.hidden = false; up.open = true; }
    });
    said.textContent = active ? found + " of " + nodes.length + " modules" : "";
  }

  tools.hidden = false;
  name.addEventListener("input", filter);
  bad.addEventListener("change", filter);
  buttons[0].addEventListener("click", () => nodes.forEach((node) => { node.open = true; }));
  buttons[1].addEventListener("click", () => nodes.forEach((node) => { node.open = false; }));
})();
