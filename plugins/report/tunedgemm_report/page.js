'use strict';
(() => {
  const given = JSON.parse(document.getElementById('data').textContent);
  const charts = given.charts, builtin = given.builtin;
  let report = given.report, compared = 20, rows = [], sort = {key: 'lost_us', down: true}, limit = 100;
  const views = {}, data = {};
  const ERROR = 1; // of Vega's log
  const MOST_SHAPES = given.most_shapes, MOST_LAYERS = given.most_layers, PAGE = 100, TOP = 5;
  const id = (name) => document.getElementById(name);

  // Text from files becomes text nodes and attributes only, never markup.
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === 'onclick') node.addEventListener('click', value);
      else if (value !== null) node.setAttribute(name, value);
    }
    for (const child of children) if (child !== null) node.append(child);
    return node;
  }
  const fill = (node, ...children) => node.replaceChildren(...children.filter((child) => child !== null));

  const number = (value) => value.toLocaleString('en-US');
  const digits = (value, most = 3) => Number(value.toPrecision(most)).toString();
  const us = (value) => !value ? '–' : value >= 1e6 ? digits(value / 1e6, 4) + ' s' : value >= 1e4 ? digits(value / 1e3, 4) + ' ms' : value.toFixed(2) + ' us';
  const times = (value) => !value ? '–' : (value >= 10 ? value.toFixed(1) : value.toFixed(2)) + 'x';
  const exact = (value) => value >= 10 ? times(value) : value.toFixed(3) + 'x';
  const percent = (share) => (share * 100).toFixed(share < 0.0995 ? 1 : 0) + ' %';
  const plural = (count, thing) => number(count) + ' ' + thing + (count === 1 ? '' : 's');
  const unpacked = (shapes) => Array.isArray(shapes) ? shapes : (Object.values(shapes)[0] || []).map((_, index) => Object.fromEntries(Object.entries(shapes).map(([key, values]) => [key, values[index]])));
  const weight = (shape) => Math.max(shape.calls, 1);
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  function meanGain(shapes) {
    const known = shapes.filter((shape) => shape.gain);
    const total = sum(known.map(weight));
    return total ? Math.exp(sum(known.map((shape) => weight(shape) * Math.log(shape.gain))) / total) : 0;
  }

  function headline() {
    const all = report.summary, tiles = [];
    const tile = (name, big, small) => tiles.push(make('div', {}, make('dt', {}, name), make('dd', {class: 'big'}, big), make('dd', {class: 'small'}, small)));
    const of = all.gain ? all.gain.shapes + ' of ' + plural(all.shapes, 'shape') : '';
    if (all.gain) {
      tile('Speed-up over torch', exact(all.gain.mean), 'geometric mean' + (all.weighted ? ' weighted by calls' : '') + ', ' + of);
      tile('All calls together', exact(all.gain.time), "torch's time over ours" + (all.weighted ? ', by calls' : ', each shape called once'));
      tile('Against torch', all.faster + ' / ' + all.equal + ' / ' + all.slower, 'faster / equal within 2 % / slower');
    } else tile('Speed-up over torch', 'unknown', "these files have no time of torch's own call; name the trial log or the profile, too");
    if (!all.gain) {
      const won = report.search.won.reduce((counts, each) => counts.set(each.libtype, (counts.get(each.libtype) || 0) + each.count), new Map());
      const [first, ...others] = [...won].sort((a, b) => b[1] - a[1]).map(([name, count]) => name + ' ' + number(count));
      if (first) tile('Shapes won', first, others.join(', ') || 'all of them');
    }
    if (all.floor) tile('Over the floor', times(all.floor.median), 'median of winner / roofline floor; worst ' + times(all.floor.worst));
    else tile('Over the floor', 'unknown', 'no measured ceilings are known for this device');
    if (all.without_winner) tile('Without a winner', number(all.without_winner), 'no solution passed');
    fill(id('tiles'), ...tiles);
    const started = report.runs.map((run) => run.started).filter(Boolean).sort();
    const when = started.length ? 'tuned ' + started[0].slice(0, 10) + (started.at(-1).slice(0, 10) === started[0].slice(0, 10) ? '' : ' to ' + started.at(-1).slice(0, 10)) : 'date of tuning not recorded';
    const ops = [...new Set(report.shapes.map((shape) => shape.op))];
    const versions = [...new Set([...report.runs.map((run) => run.version && 'tunedgemm ' + run.version).filter(Boolean), ...report.versions])];
    id('where').textContent = [plural(report.shapes.length, 'shape') + ' of ' + ops.join(', '), 'on ' + report.devices.join('; '), versions.join(', ') || 'versions not recorded', when].join(' · ');
  }

  function options(select, values, all) {
    const before = select.value;
    fill(select, make('option', {value: ''}, all), ...values.map((value) => make('option', {value: String(value)}, String(value))));
    if (values.map(String).includes(before)) select.value = before;
  }

  function filters() {
    const distinct = (key) => [...new Set(report.shapes.map((shape) => shape[key]))];
    options(id('f-op'), distinct('op'), 'all');
    options(id('f-device'), report.devices, 'all');
    id('f-device').closest('label').hidden = report.devices.length < 2;
    options(id('f-m'), distinct('m').sort((a, b) => a - b), 'all');
    options(id('f-libtype'), report.libtypes.filter((name) => report.shapes.some((shape) => shape.libtype === name)), 'any backend');
    id('f-op').closest('label').hidden = distinct('op').length < 2;
  }

  function chosen() {
    const device = id('f-device').value, op = id('f-op').value, m = id('f-m').value, libtype = id('f-libtype').value, text = id('f-text').value.trim().toLowerCase();
    return report.shapes.filter((shape) => (!device || shape.device === device) && (!op || shape.op === op) && (!m || shape.m === Number(m)) && (!libtype || shape.libtype === libtype) &&
      (!text || [shape.op, shape.text, shape.layer, shape.winner].join(' ').toLowerCase().includes(text)));
  }

  function show() {
    rows = chosen();
    const gain = meanGain(rows);
    id('shown').textContent = number(rows.length) + ' of ' + plural(report.shapes.length, 'shape') + (gain ? ', geometric mean ' + times(gain) : '');
    compare(); slow(); gains(); layers(); roofline(); won(); cost(); strips(); table();
  }

  // ---- plots
  function put(chart, sets, summary) {
    const figure = document.querySelector('[data-chart="' + chart + '"]');
    data[chart] = sets;
    const empty = Object.values(sets)[0].length === 0;
    if (empty) {
      if (views[chart]) { views[chart].finalize(); delete views[chart]; }
      fill(figure, make('p', {}, summary));
      return;
    }
    figure.setAttribute('role', 'img');
    figure.setAttribute('aria-label', summary);
    if (views[chart] && views[chart].view) {
      const view = views[chart].view;
      for (const [name, values] of Object.entries(sets)) view.data(name, values);
      view.runAsync();
    } else if (!views[chart]) draw(chart, figure);
  }

  // Names and legends leave room for the plot on a narrow screen.
  function fit(spec, width) {
    spec.axes = (spec.axes || []).map((axis) => axis.labelLimit ? {...axis, labelLimit: Math.min(axis.labelLimit, width * 0.4)} : axis);
    if (width < 560) spec.legends = (spec.legends || []).map((legend) => ({...legend, columns: 3, title: undefined}));
  }

  function draw(chart, figure) {
    const pending = views[chart] = {finalize() {}};
    const sets = data[chart], spec = {...charts[chart], data: charts[chart].data.map((each) => each.name in sets ? {...each, values: sets[each.name]} : each)};
    fit(spec, figure.clientWidth);
    vegaEmbed(figure, spec, {mode: 'vega', ast: true, logLevel: ERROR, actions: false, renderer: 'svg', defaultStyle: false, tooltip: {theme: 'none', disableDefaultStyle: true}}).then((result) => {
      if (views[chart] !== pending) { result.finalize(); return; }
      views[chart] = result;
      if (data[chart] !== sets) put(chart, data[chart], figure.getAttribute('aria-label'));
    }).catch((error) => { delete views[chart]; console.error(chart, error); });
  }

  // Of very many shapes the plots show those with the most time; the table has them all.
  function heaviest(shapes) {
    return shapes.length <= MOST_SHAPES ? shapes : [...shapes].sort((a, b) => (b.time_us || 0) - (a.time_us || 0)).slice(0, MOST_SHAPES);
  }
  const limited = (shapes) => shapes.length > MOST_SHAPES ? 'The ' + number(MOST_SHAPES) + ' shapes with the most time of ' + number(shapes.length) + '. ' : '';
  const NO_GAIN = "No chosen shape has a time of torch's own call; trial logs and profiles have it.";

  // Without any time of torch, the distance to the floor takes the place of the gain, else the rate.
  const BY_M = {'gain-by-m': ['gain', 'Gain by M'], 'floor-by-m': ['over_floor', 'Time over the floor by M'], 'rate-by-m': ['tflops', 'Rate by M']};
  function gains() {
    const chart = report.summary.gain ? 'gain-by-m' : report.summary.floor ? 'floor-by-m' : 'rate-by-m', [field, title] = BY_M[chart];
    const known = heaviest(rows.filter((shape) => shape[field] && shape.m)).sort((a, b) => a.m - b.m);
    id('h-m').textContent = title;
    for (const name of Object.keys(BY_M)) document.querySelector('[data-chart=' + name + ']').hidden = name !== chart;
    put(chart, {shapes: known}, known.length ? title + ', of ' + plural(known.length, 'shape') + '; the table of shapes has the numbers.' : chart === 'gain-by-m' ? NO_GAIN : 'No chosen shape has a time.');
  }

  function layers() {
    const known = heaviest(rows.filter((shape) => shape.gain)), by = new Map();
    for (const shape of known) { const key = (report.ops > 1 ? shape.op + ' ' : '') + shape.layer; by.set(key, [...(by.get(key) || []), shape]); }
    const left = by.size - MOST_LAYERS;
    id('layers').hidden = !report.summary.gain;
    id('layer-note').textContent = known.length ? 'Layers with the most time under torch first; a dot is one M, the bar their geometric mean.' + (left > 0 ? ' ' + plural(left, 'further layer') + ' with less time ' + (left > 1 ? 'are' : 'is') + ' in the table alone.' : '') : '';
    put('gain-by-layer', {shapes: known}, known.length ? 'Speed-up over torch by layer: ' + [...by].slice(0, 8).map(([name, shapes]) => name + ' ' + times(meanGain(shapes))).join('; ') : NO_GAIN);
  }

  function roofline() {
    const known = heaviest(rows.filter((shape) => shape.intensity && shape.tflops));
    const ceilings = report.roofs.map((roof) => roof.device + (roof.pace === 1 ? '' : ' at ' + roof.pace + ' times the 16-bit rate') + ': ' + digits(roof.bytes_s / 1e12) + ' TB/s, ' + number(Math.round(roof.flop_s / 1e12)) + ' TFLOP/s');
    const launch = report.roofs.length ? ' The floor of a shape adds ' + report.roofs[0].launch_us + ' us for its launch. It is an estimate from measured ceilings, and weights in a cache may beat it.' : '';
    id('roof-note').textContent = limited(rows) + 'Dot: winner. Ring: torch. Bar: floor.' + (ceilings.length ? ' Line: the measured ceilings of ' + ceilings.join('; ') + '.' + launch : ' No ceilings were measured for this device, so its roof and floors are left out rather than guessed.');
    put('roofline', {shapes: known, roofs: known.length ? report.roof_lines : []}, known.length ? 'Roofline of ' + plural(known.length, 'shape') + '; the table of shapes has the times.' : 'No chosen shape has a time.');
  }

  function tally() {
    const counts = new Map();
    for (const shape of rows) if (shape.libtype) { const key = shape.op + ' ' + shape.libtype; counts.set(key, (counts.get(key) || 0) + 1); }
    return counts;
  }

  function won() {
    const ops = [...new Set(rows.map((shape) => shape.op))], counts = tally();
    const names = report.libtypes.filter((name) => ops.some((op) => counts.get(op + ' ' + name)) || report.search.candidates.some((each) => each.libtype === name));
    const winners = rows.filter((shape) => shape.libtype).map(({op, libtype}) => ({op, libtype}));
    put('won', {all: winners}, winners.length ? 'Shapes won: ' + [...counts].map(([key, count]) => key + ' ' + count).join(', ') : 'No chosen shape has a winner.');
    const tied = rows.filter((shape) => shape.ties).length;
    id('won-note').textContent = rows.some((shape) => shape.timed) ? number(tied) + ' of ' + plural(winners.length, 'winner') + ' tied with others within noise.' : '';
    const timed = rows.filter((shape) => shape.us), time = sum(timed.map((shape) => weight(shape) * shape.us));
    const line = (name) => {
      const own = timed.filter((shape) => shape.libtype === name);
      return make('tr', {}, make('th', {scope: 'row'}, name), ...ops.map((op) => make('td', {class: 'num'}, number(counts.get(op + ' ' + name) || 0))), make('td', {class: 'num'}, time ? percent(sum(own.map((shape) => weight(shape) * shape.us)) / time) : '–'), make('td', {class: 'num'}, times(meanGain(own))));
    };
    const head = make('tr', {}, ...['backend', ...ops].map((text, index) => make('th', {scope: 'col', class: index ? 'num' : null}, text)), make('th', {scope: 'col', class: 'num'}, '% of time'), make('th', {scope: 'col', class: 'num'}, 'mean gain'));
    fill(id('won-table'), make('table', {}, make('thead', {}, head), make('tbody', {}, ...names.map(line))));
  }

  function cost() {
    const search = report.search, total = sum(search.rows.map((each) => each.count));
    id('cost-note').textContent = total ? number(total) + ' solutions for ' + plural(report.shapes.length, 'shape') + ', of all ops and M. "screened": dropped after a rough timing.' : '';
    put('cost', {cost: search.rows}, total ? 'Solutions tried: ' + search.rows.map((each) => each.libtype + ' ' + each.status + ' ' + each.count).join(', ') : 'These files have no trials; name the trial log or the profile, too.');
    const seconds = Object.entries(search.seconds);
    fill(id('seconds'), seconds.length ? make('p', {class: 'muted'}, 'Seconds of the search: ' + seconds.map(([name, value]) => name + ' ' + digits(value, 4)).join(', ') + '.') : total ? make('p', {class: 'muted'}, 'The seconds of the search are not in these files; trial logs have them.') : null);
  }

  // ---- one shape
  function strips() {
    const select = id('strip-shape'), before = select.value;
    const known = rows.filter((shape) => shape.timed + shape.failed > 0).slice(0, 2000);
    id('strip').hidden = !report.shapes.some((shape) => shape.timed + shape.failed > 0);
    fill(select, ...known.map((shape) => make('option', {value: String(shape.id)}, (report.ops > 1 ? shape.op + ' ' : '') + shape.text)));
    if (known.some((shape) => String(shape.id) === before)) select.value = before;
    else if (known.length) select.value = String([...known].sort((a, b) => (b.lost_us || 0) - (a.lost_us || 0))[0].id);
    strip();
  }

  function strip() {
    const shape = report.shapes[Number(id('strip-shape').value)];
    if (!shape || !id('strip-shape').value) { id('strip-note').textContent = ''; put('candidates', {strip: [], marks: []}, 'No chosen shape has trials.'); fill(id('strip-failed')); return; }
    const of = report.candidates.of[shape.id], names = report.candidates.names;
    const values = of.us.map((time, index) => ({solution: names[of.name[index]], libtype: names[of.libtype[index]], us: time, noise: of.noise[index],
      rough: of.rough[index] === '1', jitter: 0.15 + 0.7 * ((index * 0.618034) % 1), won: names[of.name[index]] === shape.winner}));
    const marks = [];
    if (shape.torch_us) marks.push({us: shape.torch_us, label: 'torch'});
    if (shape.floor_us) marks.push({us: shape.floor_us, label: 'floor'});
    const parts = [plural(shape.timed, 'solution') + ' timed' + (of.left ? ', of which ' + number(values.length) + ' are shown: the fastest, and equal steps of the rest' : '') + '.'];
    if (shape.winner) parts.push('Winner (ringed): ' + shape.winner + ', ' + us(shape.us) + (shape.gain ? ', ' + times(shape.gain) + ' torch' : '') + (shape.ties ? ', tied with ' + plural(shape.ties, 'other') + ' within noise' : '') + '.');
    else parts.push('No solution passed' + (shape.reason ? ': ' + shape.reason : '') + '.');
    parts.push('Faint: screened by a rough timing, which does not compare with the accurate ones. Bars: noise, the half width of the 95 % interval.');
    id('strip-note').textContent = parts.join(' ');
    put('candidates', {strip: values, marks}, values.length ? 'Times of ' + plural(values.length, 'candidate') + ' of ' + shape.text : 'No candidate of this shape has a time.');
    const failed = of.failed.map((each) => make('tr', {}, make('td', {class: 'num'}, number(each.count)), make('td', {}, each.status), make('td', {}, names[each.libtype]), make('td', {class: 'wide'}, names[each.reason]), make('td', {class: 'wide'}, ...each.names.flatMap((name) => [make('code', {}, names[name]), make('br')]), each.count > each.names.length && each.names.length ? 'and ' + number(each.count - each.names.length) + ' more' : '')));
    const head = ['number', 'status', 'backend', 'reason', 'solutions'].map((text, index) => make('th', {scope: 'col', class: index ? null : 'num'}, text));
    fill(id('strip-failed'), failed.length ? make('h3', {}, 'Refused and failed') : null, failed.length ? make('table', {}, make('thead', {}, make('tr', {}, ...head)), make('tbody', {}, ...failed)) : null);
  }

  function pick(shape) {
    id('strip-shape').value = String(shape.id);
    strip();
    id('strip').scrollIntoView({behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth'});
    id('strip-shape').focus({preventScroll: true});
  }
  // Long fields go below the sizes.
  function named(shape, text) {
    const words = text.split(' '), at = words.findIndex((word, index) => index > 3 && word.includes('=') && !/^[MNK]=/.test(word));
    if (at < 0 || text.length < 60) return link(shape, text);
    return make('span', {}, link(shape, words.slice(0, at).join(' ')), make('span', {class: 'fields'}, words.slice(at).join(' ')));
  }
  const link = (shape, text) => shape.timed + shape.failed > 0 ? make('button', {type: 'button', class: 'link', onclick: () => pick(shape), title: 'Show its candidates'}, text) : text;

  // ---- two sides
  function compare() {
    const section = id('compare'), found = report.compare;
    section.hidden = !found;
    if (!found) return;
    const op = id('f-op').value, m = id('f-m').value, libtype = id('f-libtype').value, text = id('f-text').value.trim().toLowerCase();
    const chosen = found.rows.filter((row) => (!op || row.op === op) && (!m || row.m === Number(m)) && (!libtype || [row.first_winner, row.second_winner].some((name) => name.startsWith(libtype + ':'))) &&
      (!text || [row.op, row.text, row.layer, row.first_winner, row.second_winner].join(' ').toLowerCase().includes(text)));
    const counts = Object.keys(found.verdicts).map((word) => found.counts[word] + ' ' + word).join(', ');
    const whole = found.mean ? 'Common shapes run ' + exact(found.mean) + ' as fast in the second (geometric mean), all their calls together ' + exact(found.time) + '. ' : 'The two have no shape in common. ';
    id('compare-note').textContent = 'First: ' + found.first + '. Second: ' + found.second + ', which the rest of this page describes. ' + whole + counts + '.' +
      (found.across ? ' They are of different devices, ' + found.first_devices.join('; ') + ' and ' + report.devices.join('; ') + ', and compared by shape alone.' : '');
    const common = chosen.filter((row) => row.ratio);
    put('compare', {compared: common.slice(0, MOST_SHAPES)}, common.length ? 'Speed-up of the second of ' + plural(common.length, 'common shape') + '; the table below has the numbers.' : 'No chosen shape is in both.');
    const side = (row, name) => row[name + '_us'] ? [row[name + '_us'].toFixed(2), make('code', {}, row[name + '_winner'])] : ['–', ''];
    const lines = chosen.slice(0, compared).map((row) => {
      const [firstUs, first] = side(row, 'first'), [secondUs, second] = side(row, 'second');
      return make('tr', {}, make('td', {class: row.verdict === 'faster' ? 'good' : row.verdict === 'slower' ? 'bad' : null, title: found.verdicts[row.verdict]}, row.verdict),
        make('td', {}, (report.ops > 1 ? row.op + ' ' : '') + row.text), make('td', {class: 'num'}, firstUs), make('td', {class: 'num'}, secondUs), make('td', {class: 'num'}, row.ratio ? exact(row.ratio) : '–'), make('td', {class: 'wide'}, first), make('td', {class: 'wide'}, second));
    });
    const head = ['verdict', 'shape', 'first us', 'second us', 'speed-up', 'first solution', 'second solution'].map((name, index) => make('th', {scope: 'col', class: index > 1 && index < 5 ? 'num' : null}, name));
    fill(id('compare-table'), make('table', {}, make('thead', {}, make('tr', {}, ...head)), make('tbody', {}, ...lines)));
    const left = chosen.length - compared;
    id('compare-more').hidden = left <= 0;
    id('compare-more').textContent = 'Show ' + number(Math.min(PAGE, left)) + ' more of ' + number(left);
  }

  // ---- lists
  function slow() {
    const floors = rows.filter((shape) => shape.lost_us), lost = sum(floors.map((shape) => shape.lost_us));
    const slower = rows.filter((shape) => shape.gain && shape.gain < 1 / 1.02);
    let note, listed;
    if (floors.length) {
      listed = [...floors].sort((a, b) => b.lost_us - a.lost_us);
      note = 'Shapes by their share of the time over the floor' + (report.summary.weighted ? ', weighted by calls' : ', each called once') + '.';
    } else {
      listed = rows.filter((shape) => shape.us).sort((a, b) => (a.gain || 9) - (b.gain || 9) || b.us - a.us);
      note = (report.summary.gain ? 'Smallest speed-ups' : 'Longest calls') + ' first; without measured ceilings the distance to the floor is unknown.';
    }
    if (slower.length) note += ' ' + plural(slower.length, 'shape') + (slower.length > 1 ? ' are' : ' is') + ' slower than torch.';
    id('h-slow').textContent = report.summary.gain || report.summary.floor ? 'Where time is left' : 'Where time goes';
    id('slow-note').textContent = listed.length ? note : 'No chosen shape has a time.';
    fill(id('slow'), ...listed.slice(0, TOP).map((shape) => {
      const share = shape.lost_us && lost ? shape.lost_us / lost : 0;
      const nums = [us(shape.us), shape.over_floor ? times(shape.over_floor) + ' the floor' : null, shape.gain ? times(shape.gain) + ' torch' : null, 'by ' + shape.libtype].filter(Boolean).join(' · ');
      const bar = share ? make('div', {class: 'meter', 'aria-hidden': 'true'}, make('i')) : null;
      if (bar) bar.firstChild.style.width = (share * 100).toFixed(1) + '%';
      const name = named(shape, (report.ops > 1 ? shape.op + ' ' : '') + shape.text);
      return make('li', {}, make('div', {class: 'head'}, make('span', {}, name), share ? make('span', {class: 'nums'}, percent(share)) : null), make('div', {class: 'nums'}, nums), bar);
    }));
  }

  const has = (key) => () => report.shapes.some((shape) => shape[key]);
  const columns = [
    {key: 'op', name: 'op', only: () => report.ops > 1}, {key: 'text', name: 'shape', cell: (shape) => named(shape, shape.text), look: 'shape'},
    {key: 'layer', name: 'layer', only: () => report.layers}, {key: 'm', name: 'M', num: true}, {key: 'calls', name: 'calls', num: true, only: () => report.summary.weighted, cell: (shape) => number(shape.calls)},
    {key: 'winner', name: 'winner', cell: (shape) => make('code', {}, shape.winner || 'no solution passed'), wide: true}, {key: 'us', name: 'us', num: true, cell: (shape) => shape.us ? shape.us.toFixed(2) : '–'},
    {key: 'noise', name: '± %', num: true, only: has('noise'), cell: (shape) => shape.noise ? (shape.noise * 100).toFixed(1) : '–'}, {key: 'torch_us', name: 'torch us', num: true, only: has('torch_us'), cell: (shape) => shape.torch_us ? shape.torch_us.toFixed(2) : '–'},
    {key: 'gain', name: 'gain', num: true, only: has('gain'), cell: (shape) => make('span', {class: !shape.gain ? null : shape.gain > 1.02 ? 'good' : shape.gain < 1 / 1.02 ? 'bad' : null}, times(shape.gain))},
    {key: 'over_floor', name: 'over floor', num: true, only: has('over_floor'), cell: (shape) => times(shape.over_floor)}, {key: 'lost_us', name: 'lost us', num: true, only: has('lost_us'), cell: (shape) => shape.lost_us ? shape.lost_us.toLocaleString('en-US', {minimumFractionDigits: 1, maximumFractionDigits: 1}) : '–'},
    {key: 'ties', name: 'tied', num: true, only: has('timed')}, {key: 'timed', name: 'timed', num: true, only: has('timed')}, {key: 'failed', name: 'failed', num: true, only: has('timed')},
  ];

  function table() {
    const order = (a, b) => {
      const x = a[sort.key], y = b[sort.key];
      if (x === y) return a.id - b.id;
      if (x === null || x === '') return 1;
      if (y === null || y === '') return -1;
      return (x < y ? -1 : 1) * (sort.down ? -1 : 1);
    };
    const shown = columns.filter((column) => !column.only || column.only()), sorted = [...rows].sort(order);
    const head = shown.map((column) => make('th', {scope: 'col', class: column.num ? 'num' : null, 'aria-sort': sort.key === column.key ? (sort.down ? 'descending' : 'ascending') : null},
      make('button', {type: 'button', 'data-sort': column.key, onclick: () => { sort = {key: column.key, down: sort.key === column.key ? !sort.down : Boolean(column.num)}; table(); id('table').querySelector('[data-sort="' + column.key + '"]').focus(); }}, column.name)));
    const body = sorted.slice(0, limit).map((shape) => make('tr', {}, ...shown.map((column) => make('td', {class: column.num ? 'num' : column.wide ? 'wide' : column.look || null}, column.cell ? column.cell(shape) : String(shape[column.key])))));
    fill(id('table'), make('table', {}, make('caption', {class: 'hidden'}, 'Shapes, sortable by each column'), make('thead', {}, make('tr', {}, ...head)), make('tbody', {}, ...body)));
    id('more').hidden = sorted.length <= limit;
    id('more').textContent = 'Show ' + number(Math.min(PAGE, sorted.length - limit)) + ' more of ' + number(sorted.length - limit);
  }

  function grid(headings, lines, label) {
    const cell = (tag, value, index, more = {}) => make(tag, {class: headings[index][1] || null, ...more}, value);
    const head = make('tr', {}, ...headings.map(([name], index) => cell('th', name, index, {scope: 'col'})));
    return make('div', {class: 'scroll', role: 'region', tabindex: '0', 'aria-label': label}, make('table', {}, make('thead', {}, head), make('tbody', {}, ...lines.map((line) => make('tr', {}, ...line.map((value, index) => cell('td', value, index)))))));
  }

  function coverage() {
    const found = report.coverage;
    id('coverage').hidden = !found;
    if (!found) return;
    if (found.why) { fill(id('coverage-facts'), make('p', {class: 'muted'}, found.why)); return; }
    const meter = (share) => { const bar = make('div', {class: 'meter', 'aria-hidden': 'true'}, make('i')); bar.firstChild.style.width = (share * 100).toFixed(1) + '%'; return make('div', {}, percent(share), bar); };
    const parts = [make('p', {}, found.headline + ' (' + plural(found.calls, 'call') + ', on ' + found.device + ').'),
      make('p', {class: 'muted'}, "By the tables named here, above those of the machine that made this page, and with the backends installed there."),
      grid([['served by', 'wide'], ['shapes', 'num'], ['calls', 'num'], ['of calls'], ['of time']], found.ways.map((way) => [way.word + ': ' + way.meaning, number(way.shapes), number(way.count), meter(way.calls), meter(way.time)]), 'Calls by what serves them')];
    for (const text of found.regrets) parts.push(make('p', {}, text));
    if (found.unused.length) parts.push(make('h3', {}, 'Rows that are not used'), grid([['calls', 'num'], ['backend'], ['reason', 'wide']], found.unused.map((each) => [number(each.calls), each.libtype, each.reason]), 'Rows that are not used'),
      make('p', {class: 'muted'}, 'With all of these in use, rows of exactly their M would serve ' + percent(found.with_unused) + ' of the calls.'));
    if (found.next.length) parts.push(make('h3', {}, 'What to tune next'), grid([['layer', 'wide'], ['of time', 'num'], ['M', 'wide']], found.next.map((each) => [each.layer, percent(each.share), each.m]), 'What to tune next'));
    for (const note of found.notes) parts.push(make('p', {class: 'muted'}, note));
    fill(id('coverage-facts'), ...parts);
  }

  function ab() {
    id('ab').hidden = !report.ab.length;
    const headings = [['ran', 'wide'], ['A', 'wide'], ['B', 'wide'], ['turns'], ['B over A', 'num'], ['A/A control', 'num'], ['verdict']];
    const lines = report.ab.map((each) => [each.what, each.a, each.b, each.turns, each.effect, each.control, each.verdict]);
    fill(id('ab-facts'), grid(headings, lines, 'Arms in turns'), make('p', {class: 'muted'}, 'From ' + report.ab.map((each) => each.path).join(', ') + '. More than 0 is slower.'));
  }

  function about() {
    const list = (items) => make('ul', {}, ...items.map((item) => make('li', {}, item)));
    const parts = [make('h3', {}, 'Files'), list(report.files.map((file) => file.kind + ': ' + file.path))];
    if (report.notes.length) parts.push(make('h3', {}, 'Notes'), list(report.notes));
    const faults = report.faults.map((fault) => make('span', {}, fault.path + ': ' + plural(fault.count, 'line') + ' left out', list([...fault.named, ...(fault.count > fault.named.length ? [plural(fault.count - fault.named.length, 'further line')] : [])])));
    if (faults.length) parts.push(make('h3', {}, 'Lines that could not be read'), list(faults));
    const left = sum(report.candidates.of.map((of) => of.left));
    if (left) parts.push(make('h3', {}, 'Left out of this page'), make('p', {}, number(left) + ' timed candidates. Each shape keeps ' + report.candidates.room + ': its fastest, and equal steps of the rest. Counts, winners and gains are of all.'));
    const runs = report.runs.slice(0, 20).map((run) => [run.op, run.version && 'tunedgemm ' + run.version, run.started, ...Object.entries(run.identity).map(([name, value]) => name + ' ' + value)].filter(Boolean).join(', '));
    if (runs.length) parts.push(make('h3', {}, 'Runs'), list([...runs, ...(report.runs.length > 20 ? [plural(report.runs.length - 20, 'further run')] : [])]));
    parts.push(make('h3', {}, 'Terms'), list([
      ...Object.entries(report.shared).map(([op, fields]) => 'every shape of ' + op + ': ' + fields),
      "gain: the time of torch's own call over the winner's, cold weights, medians", 'equal: within 2 %, which noise alone makes',
      'floor: launch, and the larger of bytes over bandwidth and operations over the peak rate, both measured', 'lost us: the time over the floor, times the calls where they are known',
      'tied: solutions as fast as the winner within noise', 'geometric mean: weighted by calls where a list of captured shapes was given',
    ]), make('p', {class: 'muted'}, 'Made by tunedgemm ' + report.made.by + ' at ' + report.made.at + '.'));
    fill(id('about'), ...parts);
  }

  function theme(dark) {
    document.documentElement.dataset.theme = dark ? 'dark' : 'light';
    id('theme').textContent = dark ? 'Light' : 'Dark';
    id('theme').setAttribute('aria-pressed', String(dark));
    id('theme').setAttribute('aria-label', 'Dark theme');
  }

  function update(newer) {
    report = {...newer, shapes: unpacked(newer.shapes), compare: newer.compare && {...newer.compare, rows: unpacked(newer.compare.rows)}};
    report.ops = new Set(report.shapes.map((shape) => shape.op)).size;
    report.layers = report.summary.weighted && report.shapes.some((shape) => !shape.text.includes(shape.layer));
    headline(); filters(); show(); coverage(); ab(); about();
  }

  for (const name of ['f-device', 'f-op', 'f-m', 'f-libtype']) id(name).addEventListener('change', () => { limit = PAGE; show(); });
  id('f-text').addEventListener('input', () => { limit = PAGE; show(); });
  id('filters').addEventListener('submit', (event) => event.preventDefault());
  id('strip-shape').addEventListener('change', strip);
  id('compare-more').addEventListener('click', () => { compared += PAGE; compare(); });
  id('more').addEventListener('click', () => { limit += PAGE; table(); });
  id('theme').addEventListener('click', () => theme(document.documentElement.dataset.theme !== 'dark'));
  window.addEventListener('beforeprint', () => { limit = Math.max(limit, MOST_SHAPES); table(); }); // paper has no button for more
  theme(matchMedia('(prefers-color-scheme: dark)').matches);
  update(report);
  window.tunedgemmReport = {update, views, get rows() { return rows; }};
})();
