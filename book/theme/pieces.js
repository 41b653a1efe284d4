// The figures of two pages that stand by themselves: the matrix of "What gradcheck misses", and the vector of "A step that
// unlearns". Without scripts there is a table and a still picture. Nothing is fetched; all data stands in the page.
(function () {
    'use strict';

    const CALM = window.matchMedia('(prefers-reduced-motion: reduce)').matches;

    function element(name, attributes, ...children) {
        const made = document.createElement(name);
        Object.entries(attributes || {}).forEach(function ([key, value]) { made.setAttribute(key, value); });
        made.append(...children);
        return made;
    }

    function button(words, action) {
        const made = element('button', { type: 'button' }, words);
        made.addEventListener('click', action);
        return made;
    }

    // ---- What gradcheck misses ------------------------------------------------------------------------------------

    function codeBlock(text) {
        const code = element('code', { class: 'language-python hljs' }, text);
        if (typeof hljs !== 'undefined') { code.innerHTML = hljs.highlight('python', text).value; }
        return element('pre', {}, code);
    }

    const HELPERS = {
        'rows(': 'rows(t) is t as a matrix of its rows. ',
        'memory(': 'memory(t) is the elements of t in the order of memory, as a kernel sees them. ',
        DROPPED: 'DROPPED is the probability that an element is dropped. ',
        IGNORED: 'A target of IGNORED does not count. ',
    };

    function helpersIn(code) {
        return Object.keys(HELPERS).filter(function (name) { return code.includes(name); }).map(function (name) { return HELPERS[name]; }).join('');
    }

    function listed(names) {
        return names.length < 2 ? names.join('') : `${names.slice(0, -1).join(', ')} and ${names[names.length - 1]}`;
    }

    // What the checks say of a version: one sentence for the usual ones, one for check_backward.
    function verdictOf(version) {
        const usual = version.seen.length ? `${listed(version.seen)} object${version.seen.length === 1 ? 's' : ''}.`
            : 'None of the seven usual checks objects.';
        const own = version.right ? 'check_backward finds it right in every try.'
            : `check_backward rejects it in the try “${version.try}”: ${version.said}`;
        return `${usual[0].toUpperCase()}${usual.slice(1)} ${own}`;
    }

    function catches(place) {
        const table = place.querySelector('table.catches');
        const data = JSON.parse(place.querySelector('.catches-data').textContent);
        const mended = new Set();
        const said = element('p', { role: 'status', class: 'catches-said' });
        const dialog = element('dialog', { class: 'catches-dialog', 'aria-label': 'A wrong backward pass' });
        const grid = [];
        let timer = null;

        // One row of the table becomes buttons: arrow keys walk through them, Tab passes the table by.
        [...table.tBodies[0].rows].forEach(function (row, r) {
            grid.push([...row.cells].map(function (cell, c) {
                const check = c ? data.checks[c - 1] : '';
                const words = c ? `${data.bugs[r].name}, ${check}: ${cell.className === 'found' ? 'finds it' : 'misses it'}`
                    : `open ${data.bugs[r].name}`;
                const made = element('button', { type: 'button', tabindex: -1, 'aria-label': words }, ...cell.childNodes);
                made.addEventListener('click', function () { open(r); });
                made.addEventListener('keydown', function (event) {
                    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] || [0, 0];
                    const next = (grid[r + down] || [])[c + right];
                    if ((down || right) && next) { event.preventDefault(); next.tabIndex = 0; made.tabIndex = -1; next.focus(); }
                });
                cell.replaceChildren(made);
                return made;
            }));
        });
        grid[0][0].tabIndex = 0;

        function show(column) {
            table.dataset.shown = String(column + 1);
            [table.tHead, table.tBodies[0], table.tFoot].forEach(function (part) {
                [...part.rows].forEach(function (row) {
                    [...row.cells].forEach(function (cell, c) { cell.classList.toggle('to-come', c > column + 1); });
                });
            });
            const count = data.bugs.filter(function (bug, r) { return grid[r][column + 1].parentNode.className.includes('found'); }).length;
            said.textContent = `${data.checks[column]} finds ${count} of ${data.bugs.length}.`;
        }

        function play() {
            let column = 0;
            clearInterval(timer);
            show(CALM ? data.checks.length - 1 : column);
            timer = CALM ? null : setInterval(function () {
                column += 1;
                show(column);
                if (column === data.checks.length - 1) { clearInterval(timer); }
            }, 900);
        }

        function open(number) {
            const bug = data.bugs[number];
            clearInterval(timer);
            show(data.checks.length - 1);
            const verdict = element('p', { role: 'status', class: 'catches-verdict' }, 'Choose an edit.');
            const why = element('p', { class: 'catches-why' });
            const edits = element('div', { class: 'catches-edits' });
            bug.edits.forEach(function (edit, i) {
                const lines = edit.diff.map(function ([sign, text]) {
                    return element('span', { class: sign === '+' ? 'added' : 'taken' }, `${sign === '+' ? '+' : '−'} ${text}\n`);
                });
                const made = element('button', { type: 'button', 'aria-pressed': 'false', 'aria-label': `edit ${i + 1}: ` +
                    edit.diff.filter(function ([sign]) { return sign === '+'; }).map(function ([, text]) { return text; }).join('; ') },
                    element('code', {}, ...lines));
                made.addEventListener('click', function () {
                    [...edits.children].forEach(function (other) { other.setAttribute('aria-pressed', String(other === made)); });
                    made.classList.add(edit.right ? 'right' : 'wrong');
                    verdict.className = `catches-verdict ${edit.right ? 'right' : 'wrong'}`;
                    verdict.textContent = `${edit.right ? 'Mended.' : 'Still wrong.'} ${verdictOf(edit)}`;
                    if (edit.right) { mended.add(number); why.textContent = bug.story; }
                    place.dataset.mended = String(mended.size);
                });
                edits.append(made);
            });
            const step = function (by) { return function () { open((number + by + data.bugs.length) % data.bugs.length); }; };
            const links = bug.source ? [' It was reported in public: ', element('a', { href: bug.source }, bug.source.replace('https://', '')), '.'] : [];
            dialog.replaceChildren(
                element('div', { class: 'player-buttons' }, element('strong', {}, bug.name), `${number + 1} of ${data.bugs.length}`,
                    button('Back', step(-1)), button('Next', step(1)), button('Close', function () { dialog.close(); })),
                element('p', {}, bug.effect, ...links),
                codeBlock(bug.code), element('p', { class: 'catches-note' }, helpersIn(bug.code)),
                element('p', {}, `As it stands: ${verdictOf(bug)}`),
                element('p', {}, element('strong', {}, 'Six edits, of which at least one mends it.')),
                edits, verdict, why);
            if (!dialog.open) { dialog.showModal(); }
            dialog.scrollTop = 0;
            place.dataset.open = bug.name;
        }

        dialog.addEventListener('click', function (event) { if (event.target === dialog) { dialog.close(); } });
        place.prepend(element('div', { class: 'player-buttons' }, button('Play again', play),
            button('Open one at random', function () { open(Math.floor(Math.random() * data.bugs.length)); })), said);
        place.append(dialog);
        play();
    }

    const PLAYERS = { catches };
    document.querySelectorAll('[data-piece]').forEach(function (place) {
        PLAYERS[place.dataset.piece](place);
        // Elsewhere on a page the arrow keys turn to the next chapter.
        place.addEventListener('keydown', function (event) { event.stopPropagation(); });
        place.classList.add('player-ready');
    });
})();
