'use strict';
(() => {
  const EVERY = 1000, LOST = 3; // milliseconds between questions; unanswered ones until the run counts as gone
  const given = '@@GIVEN@@'; // version, drawn
  const page = sessionStorage.livePage || (sessionStorage.livePage = Math.random().toString(36).slice(2));
  const note = document.createElement('p');
  let seen = given.version, command = '', unanswered = 0;
  note.id = 'live';
  note.style.fontWeight = '600';
  note.setAttribute('role', 'status');
  note.setAttribute('aria-live', 'off'); // it changes each second
  document.getElementById('where').after(note);

  function say(text, ended) {
    if (ended) note.setAttribute('aria-live', 'polite');
    note.dataset.ended = String(ended);
    note.textContent = text + (ended && command ? ' To keep this page:' : '');
    if (!ended || !command) return;
    const code = note.appendChild(document.createElement('code')); // copied whole, so it is never broken
    code.textContent = command;
    code.tabIndex = 0;
    Object.assign(code.style, {display: 'block', whiteSpace: 'pre', overflowX: 'auto', fontWeight: '400'});
  }

  async function get(name) {
    const answer = await fetch(name, {cache: 'no-cache'});
    if (!answer.ok) throw new Error(name + ': ' + answer.status);
    return answer.json();
  }

  async function poll() {
    const shown = seen;
    let state;
    try {
      state = await get('state.json?seen=' + seen + '&page=' + page);
      unanswered = 0;
      command = state.command;
      if (state.version !== seen) {
        const newer = await get('report.json');
        if (newer.drawn !== given.drawn) return location.reload(); // plots name their backends
        window.tunedgemmReport.update(newer.report);
        document.title = newer.report.title + ' - tunedgemm';
        seen = newer.version;
      }
    } catch (error) {
      unanswered += 1;
      if (unanswered >= LOST) return say('The run has ended; its last state is below.', true);
      return setTimeout(poll, EVERY);
    }
    say(state.text, state.finished);
    if (!state.finished) return setTimeout(poll, EVERY);
    if (seen !== shown) get('state.json?seen=' + seen + '&page=' + page).catch(() => {}); // the server waits for this
  }

  // An empty report has nothing to say; the first shape loads the page again.
  for (const name of ['main', 'where']) document.getElementById(name).hidden = !JSON.parse(given.drawn)[0].length;
  poll();
})();
