// One head: the matrix.

let matrix = null; // where the matrix lies on its canvas, and the drawn cells
function layoutMatrix() {
  const canvas = $("matrix");
  const width = canvas.parentElement.clientWidth;
  const context = canvas.getContext("2d");
  context.font = `13px ${colours.font}`;
  let longest = 0;
  for (let token = 0; token < text.n; token++)
    longest = Math.max(longest, context.measureText(labelOf(token)).width);
  const margin = Math.ceil(Math.max(60, Math.min(longest + 14, width < 500 ? 84 : 130)));
  const cell = Math.min(72, (width - margin - 8) / state.span);
  const upright = longest + 10 > cell;
  const above = upright ? (cell < 11 ? Math.min(margin, 64) : margin) : 20;
  matrix = {
    width,
    margin,
    top: 20 + above,
    cell: cell > 4 ? Math.floor(cell) : cell,
    upright,
    cells: null,
  };
  matrix.side = matrix.cell * state.span;
}

function drawMatrix(query = state.query, key = state.key) {
  const view = viewOf(state.layer, state.column);
  const canvas = $("matrix");
  const { width, margin, top, cell, side } = matrix;
  const { row, left, span } = state;
  const id = [view.id, row, left, span, state.shown, side, colours.dark].join();
  if (matrix.id !== id) {
    const pixels = cell >= 1 ? span : Math.floor(side * (devicePixelRatio || 1));
    matrix.cells = raster(view, row, left, span, Math.min(span, pixels));
    matrix.id = id;
  }
  const context = sized(canvas, width, top + side + 4);
  context.fillStyle = colours.panel;
  context.fillRect(margin, top, side, side);
  context.imageSmoothingEnabled = false;
  context.drawImage(matrix.cells, margin, top, side, side);
  if (cell >= 34) drawNumbers(context, view);
  const place = (token, start) => (token - start) * cell;
  context.save();
  context.beginPath();
  context.rect(margin - 2, top - 2, side + 4, side + 4);
  context.clip();
  if (text.prompt_length < state.shown) {
    context.strokeStyle = colours.made;
    context.setLineDash([5, 4]);
    const [x, y] = [margin + place(text.prompt_length, left), top + place(text.prompt_length, row)];
    context.strokeRect(margin - 9, y, side + 18, side * 2);
    context.strokeRect(x, top - 9, side * 2, side + 18);
    context.setLineDash([]);
  }
  context.strokeStyle = colours.accent;
  context.lineWidth = 2;
  context.strokeRect(margin - 1, top + place(query, row) - 1, side + 2, Math.max(cell, 2) + 2);
  context.strokeRect(margin + place(key, left) - 1, top - 1, Math.max(cell, 2) + 2, side + 2);
  context.restore();
  drawLabels(context, query, key);
  Object.assign(canvas.dataset, { margin, top, cell, row, left, span });
  describe(query, key);
}

function drawNumbers(context, view) {
  const { margin, top, cell } = matrix;
  context.font = `${cell >= 52 ? 13 : 11}px ${colours.font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let y = 0; y < state.span; y++) {
    for (let x = 0; x < state.span; x++) {
      const [query, key] = [state.row + y, state.left + x];
      if (query >= state.shown || key >= state.shown) continue;
      const value = view.at(query, key);
      if (key > query && isCausal(view.kind) && value === 0) continue;
      const shade = view.shade(value);
      context.fillStyle = shade < 0 || key > query ? colours.soft : inkOn(shade);
      const share = 100 * value;
      const number = () => (value === -Infinity ? "−∞" : plain(value, cell >= 52 ? 3 : 2));
      const written = isShare(view.kind)
        ? share.toFixed(share < 9.95 && share > 0 ? 1 : 0)
        : number();
      context.fillText(written, margin + (x + 0.5) * cell, top + (y + 0.5) * cell);
    }
  }
}

function drawLabels(context, query, key) {
  const { margin, top, cell, upright } = matrix;
  const every =
    cell >= 11 ? 1 : [10, 20, 50, 100, 200, 500].find((step) => step * cell >= 26) || 1000;
  const fit = (label, room) => {
    if (context.measureText(label).width <= room) return label;
    const cut = Array.from(label);
    while (cut.length > 1 && context.measureText(`${cut.join("")}…`).width > room) cut.pop();
    return `${cut.join("")}…`;
  };
  const mark = (token, chosen, x, y, turned) => {
    context.save();
    context.translate(x, y);
    if (turned) context.rotate(-Math.PI / 2);
    context.font = `${chosen ? "600 " : ""}${cell < 14 && every === 1 ? 11 : 13}px ${colours.font}`;
    context.fillStyle = chosen
      ? colours.accent
      : token >= state.shown
        ? colours.line
        : isMade(token)
          ? colours.made
          : colours.ink;
    const room = turned ? top - 26 : upright ? margin - 8 : cell - 4;
    context.fillText(every > 1 && !chosen ? String(token) : fit(labelOf(token), room), 0, 0);
    context.restore();
  };
  context.textBaseline = "middle";
  for (const [start, chosen, isRow] of [
    [state.row, query, true],
    [state.left, key, false],
  ]) {
    for (let i = 0; i < state.span; i++) {
      const token = start + i;
      const middle = (i + 0.5) * cell;
      const clash = every > 1 && Math.abs(token - chosen) * cell < 14;
      if (token !== chosen && (token % every || clash)) continue;
      context.textAlign = isRow ? "right" : upright ? "left" : "center";
      if (isRow) mark(token, token === chosen, margin - 6, top + middle, false);
      else mark(token, token === chosen, margin + middle, top - (upright ? 6 : 11), upright);
    }
  }
  context.font = `12px ${colours.font}`;
  context.fillStyle = colours.soft;
  context.textAlign = "left";
  context.fillText("reads from →", margin, 9);
  context.textAlign = "right";
  context.fillText("token ↓", margin - 12, 9);
}

function describe(query, key) {
  const view = viewOf(state.layer, state.column);
  const value = view.at(query, key);
  const exact =
    text.maps[view.kind === "value-weighted" ? "weights" : view.kind].dtype === "float32";
  const number = value === -Infinity ? "−∞" : plain(value, exact ? 9 : 3);
  const pair = `${called(query)} → ${called(key)}`;
  let said = `${pair}: ${isShare(view.kind) ? `${percent(value)}  (${number})` : number}`;
  if (key > query && isCausal(view.kind)) said = `${pair}: masked, ${called(key)} comes later`;
  else if (key > query) said += ", computed but masked afterwards";
  $("readout").textContent = said;
  $("matrix").setAttribute("aria-label", `Matrix of ${nameOf(state.layer, state.column)}; ${said}`);
}

function keepInView() {
  const last = Math.max(0, text.n - state.span);
  const clamp = (start, token) =>
    Math.min(last, Math.max(0, token < start ? token : Math.max(start, token - state.span + 1)));
  state.row = clamp(state.row, state.query);
  state.left = clamp(state.left, state.key);
}

function zoom(factor) {
  const before = state.span;
  state.span =
    factor === 0
      ? text.n
      : Math.max(Math.min(6, text.n), Math.min(text.n, Math.round(state.span * factor)));
  if (state.span === before && factor !== 0) return;
  const centre = (token) => Math.round(token - state.span / 2);
  [state.row, state.left] = [centre(state.query), centre(state.key)];
  keepInView();
  layoutMatrix();
  drawMatrix();
}
