// What can be played with: the gradient of LayerNorm, the order of blocks in a race, the matrix of "What gradcheck misses", the vector of
// "A step that unlearns", and the climb of "Make it fast, backwards too". Each takes the place of a still picture or a table, which is
// what a reader without scripts sees. Nothing is fetched; all data stands in the page.
(function () {
    'use strict';

    const CALM = window.matchMedia('(prefers-reduced-motion: reduce)').matches;
    const SVG = 'http://www.w3.org/2000/svg';

    function furnish(made, attributes, children) {
        Object.entries(attributes).forEach(function ([key, value]) { made.setAttribute(key, value); });
        made.append(...children);
        return made;
    }

    function element(name, attributes, ...children) { return furnish(document.createElement(name), attributes, children); }

    function shape(name, attributes, ...words) { return furnish(document.createElementNS(SVG, name), attributes, words); }

    function button(words, action) {
        const made = element('button', { type: 'button' }, words);
        made.addEventListener('click', action);
        return made;
    }

    // ---- Break the gradient ---------------------------------------------------------------------------------------

    const EPS = 1e-5;
    const START = { x: [0.5, -1.2, 2, 0.3, -0.4, 1.1, -2.2, 0.1], g: [1.4, 0.2, -0.6, 1.8, 0.9, -1.1, 0.4, 1.2] };
    const FORMULAS = {
        'the diagonal of J alone': function (p, i) { return p.g[i] * (1 - 1 / p.H - p.xHat[i] * p.xHat[i] / p.H); },
        'without c1': function (p, i) { return p.g[i] - p.c2; },
        'without c2': function (p, i) { return p.g[i] - p.c1 * p.xHat[i]; },
        'without either': function (p, i) { return p.g[i]; },
    };

    function mean(values) { return values.reduce(function (a, b) { return a + b; }, 0) / values.length; }

    // Everything about one row. `rest` is dx / rstd.
    function gradient(x, g) {
        const H = x.length, mu = mean(x);
        const rstd = 1 / Math.sqrt(mean(x.map(function (v) { return (v - mu) * (v - mu); })) + EPS);
        const xHat = x.map(function (v) { return (v - mu) * rstd; });
        const c2 = mean(g), c1 = mean(g.map(function (v, i) { return v * xHat[i]; }));
        const rest = g.map(function (v, i) { return v - c2 - c1 * xHat[i]; });
        return { H, g, rstd, xHat, c1, c2, rest };
    }

    // A number with two digits; -0.00 would look like a sign.
    function twoDigits(value) { return (Math.abs(value) < 5e-3 ? 0 : value).toFixed(2); }

    // Draws a heat map with its numbers; blue is above zero, orange below.
    function heatMap(p) {
        const cell = 34, side = cell * p.H;
        const svg = shape('svg', { viewBox: `0 0 ${side} ${side}`, role: 'img',
            'aria-label': `J divided by rstd: ones on the diagonal, minus 1/H and minus x_hat_i x_hat_j / H everywhere` });
        for (let i = 0; i < p.H; i++) {
            for (let j = 0; j < p.H; j++) {
                const value = (i === j) - 1 / p.H - p.xHat[i] * p.xHat[j] / p.H;
                svg.append(
                    shape('rect', { x: j * cell, y: i * cell, width: cell - 2, height: cell - 2, rx: 2,
                        class: value < 0 ? 'below' : 'above', 'fill-opacity': Math.min(1, Math.abs(value)) * 0.4 }),
                    shape('text', { x: j * cell + cell / 2 - 1, y: i * cell + cell / 2 + 3, 'text-anchor': 'middle' },
                        twoDigits(value)));
            }
        }
        return svg;
    }

    // Draws rows of bars to one scale: [label, values, outlined values or null].
    function barRows(rows) {
        const left = 150, column = 40, height = 62;
        const count = rows[0][1].length;
        const most = Math.max(0.5, ...rows.flatMap(function (row) { return [...row[1], ...(row[2] || [])].map(Math.abs); }));
        const svg = shape('svg', { viewBox: `0 0 ${left + column * count} ${height * rows.length}`, role: 'img',
            'aria-label': rows.map(function (row) {
                return row[0] + ' ' + row[1].map(twoDigits).join(', ');
            }).join('; ') });
        rows.forEach(function ([label, values, outlined], r) {
            const middle = height * r + height / 2;
            svg.append(shape('text', { x: 0, y: middle + 5, 'font-size': 15 }, label),
                shape('line', { x1: left, x2: left + column * count, y1: middle, y2: middle, class: 'axis' }));
            function bar(value, i, kind) {
                const size = Math.abs(value) / most * (height / 2 - 3);
                const wide = kind === 'outline' ? 30 : 22;
                svg.append(shape('rect', { x: left + column * i + (column - wide) / 2, width: wide,
                    y: value < 0 ? middle : middle - size, height: size, class: kind }));
            }
            values.forEach(function (value, i) { bar(value, i, value < 0 ? 'below' : 'above'); });
            (outlined || []).forEach(function (value, i) { bar(value, i, 'outline'); });
        });
        return svg;
    }

    function number(value) { return (Math.abs(value) < 5e-4 ? 0 : value).toFixed(3); }

    function breakTheGradient(place) {
        const sliders = { x: [], g: [] };
        const inputs = element('div', { class: 'player-sliders' });
        for (const name of ['x', 'g']) {
            const group = element('fieldset', {}, element('legend', {}, name === 'x' ? 'x, the row' : 'g, the gradient at x̂'));
            START[name].forEach(function (value, i) {
                const slider = element('input', { type: 'range', min: -3, max: 3, step: 'any', value });
                const said = element('output', {});
                slider.addEventListener('input', show);
                sliders[name].push(slider);
                group.append(element('label', {}, `${name}${i} `, slider, said));
            });
            inputs.append(group);
        }
        const choice = element('select', {});
        Object.keys(FORMULAS).forEach(function (name) { choice.append(element('option', {}, name)); });
        choice.addEventListener('change', show);
        const facts = element('p', { role: 'status' }), caption = place.querySelector('figcaption');
        const pictures = element('div', { class: 'player-pictures' });

        function values(name) { return sliders[name].map(function (slider) { return Number(slider.value); }); }

        function set(name, wanted) {
            sliders[name].forEach(function (slider, i) { slider.value = wanted[i]; });
            show();
        }

        function show() {
            for (const name of ['x', 'g']) {
                sliders[name].forEach(function (slider) {
                    slider.nextSibling.textContent = Number(slider.value).toFixed(1);
                });
            }
            const p = gradient(values('x'), values('g'));
            const wrong = p.g.map(function (_, i) { return FORMULAS[choice.value](p, i); });
            pictures.replaceChildren(
                element('div', {}, element('p', {}, 'J / rstd: i ↓, j →'), heatMap(p)),
                element('div', {}, element('p', {}, 'The components of g'), barRows([
                    ['g', p.g, null],
                    ['c2, along 1', p.g.map(function () { return p.c2; }), null],
                    ['c1 x̂, along x̂', p.xHat.map(function (v) { return p.c1 * v; }), null],
                    ['rest = dx / rstd', p.rest, wrong]])));
            const dx = p.rest.map(function (v) { return p.rstd * v; });
            const sum = dx.length * mean(dx), along = p.H * mean(dx.map(function (v, i) { return v * p.xHat[i]; }));
            const wrongSum = p.rstd * wrong.length * mean(wrong);
            const wrongAlong = p.rstd * p.H * mean(wrong.map(function (v, i) { return v * p.xHat[i]; }));
            facts.textContent = `rstd ${number(p.rstd)}, c1 ${number(p.c1)}, c2 ${number(p.c2)}. ` +
                `dx sums to ${number(sum)}, and its dot product with x̂ is ${number(along)}. ` +
                `For the outline (${choice.value}) these numbers are ${number(wrongSum)} and ${number(wrongAlong)}.`;
            place.dataset.dx = JSON.stringify(dx);
            place.dataset.wrong = JSON.stringify(wrong.map(function (v) { return p.rstd * v; }));
        }

        const H = START.x.length;
        const buttons = element('div', { class: 'player-buttons' },
            button('Reset', function () { set('x', START.x); set('g', START.g); }),
            button('g the same everywhere', function () { set('g', Array(H).fill(1)); }),
            button('g = x̂', function () { set('g', gradient(values('x'), values('g')).xHat); }),
            button('One x far away', function () { set('x', [3, ...Array(H - 1).fill(-0.4)]); }),
            button('All x nearly equal', function () { set('x', [0.01, ...Array(H - 1).fill(0)]); }),
            element('label', {}, 'Outline: ', choice));
        place.replaceChildren(buttons, inputs, pictures, facts, caption);
        show();
    }

    // ---- The order of blocks --------------------------------------------------------------------------------------

    const BLOCKS = 16;

    // What the sum is after each block, in an order: block 0 clears it first where it may, then each adds 1.
    function runBlocks(order, clearedBefore) {
        let sum = clearedBefore ? 0 : NaN;  // what the buffer holds before: nobody knows
        return order.map(function (block) {
            if (block === 0 && !clearedBefore) { sum = 0; }
            sum += 1;
            return sum;
        });
    }

    function blockOrders(place) {
        const order = Array.from({ length: BLOCKS }, function (_, i) { return i; });
        let held = null;
        const row = element('div', { class: 'player-blocks', role: 'listbox', 'aria-label': 'the order in which the blocks run',
            'aria-orientation': 'horizontal' });
        const apart = element('input', { type: 'checkbox' });
        apart.addEventListener('change', show);
        const facts = element('p', { role: 'status' });

        function move(from, to) {
            if (to < 0 || to >= BLOCKS) { return; }
            order.splice(to, 0, ...order.splice(from, 1));
            show();
            row.children[to].focus();
        }

        function show() {
            const sums = runBlocks(order, apart.checked);
            row.replaceChildren(...order.map(function (block, at) {
                const clears = block === 0 && !apart.checked;
                const made = element('div', { role: 'option', tabindex: 0, draggable: 'true', 'aria-selected': 'false',
                    class: clears ? 'clears' : '',
                    'aria-label': `block ${block}, place ${at + 1} of ${BLOCKS}: ${clears ? 'clears, then adds' : 'adds'} 1, ` +
                        `the sum is then ${Number.isNaN(sums[at]) ? 'what was there, and more' : sums[at]}` },
                    element('b', {}, String(block)), element('small', {}, clears ? '= 0, + 1' : '+ 1'),
                    element('span', {}, Number.isNaN(sums[at]) ? '?' : String(sums[at])));
                made.addEventListener('keydown', function (event) {
                    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: BLOCKS - 1 }[event.key];
                    if (to !== undefined) { event.preventDefault(); move(at, to); }
                });
                made.addEventListener('dragstart', function (event) {
                    held = at;
                    event.dataTransfer.setData('text/plain', String(block));
                });
                made.addEventListener('dragend', function () { held = null; });
                made.addEventListener('dragover', function (event) { event.preventDefault(); });
                made.addEventListener('drop', function (event) { event.preventDefault(); move(held, at); });
                // A finger drags no elements: a tap picks a block up, the next tap puts it down.
                made.addEventListener('click', function () {
                    if (held === null) {
                        held = at;
                        made.setAttribute('aria-selected', 'true');
                    } else {
                        const from = held;
                        held = null;
                        move(from, at);
                    }
                });
                return made;
            }));
            held = null;
            const sum = sums[BLOCKS - 1], lost = BLOCKS - sum;
            facts.textContent = lost === 0
                ? `In ${apart.checked ? 'every' : 'this'} order the sum is ${sum}, as it should be.`
                : `The sum is ${sum} and should be ${BLOCKS}: ${lost} addition${lost === 1 ? ' is' : 's are'} lost.`;
            place.dataset.sum = String(sum);
        }

        place.replaceChildren(
            element('div', { class: 'player-buttons' },
                button('Natural', function () { order.sort(function (a, b) { return a - b; }); show(); }),
                button('Reversed', function () { order.sort(function (a, b) { return b - a; }); show(); }),
                button('Shuffle', function () {
                    const keys = order.map(Math.random);
                    order.sort(function (a, b) { return keys[a] - keys[b]; });
                    show();
                }),
                element('label', {}, apart, ' clear in a separate launch')),
            row, facts);
        show();
    }

    // ---- What gradcheck misses ------------------------------------------------------------------------------------

    function codeBlock(text) {
        const code = element('code', { class: 'language-python hljs' }, text);
        if (typeof hljs !== 'undefined') { code.innerHTML = hljs.highlight('python', text).value; }
        return element('pre', {}, code);
    }

    // Text between backticks is code.
    function withCode(text) {
        return text.split('`').map(function (part, i) { return i % 2 ? element('code', {}, part) : part; });
    }

    const HELPERS = {
        'rows(': 'rows(t) is t as a matrix of its rows. ',
        'EPS)': 'EPS is 1e-5. ',
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

    // The code as lines that can be clicked; lines of methods without a wrong line are marked.
    function codeLines(text, wrong, choose) {
        const lines = text.split('\n');
        const made = lines.map(function (line, i) {
            const code = codeBlock(`${line}\n`).firstChild;
            if (['', '@staticmethod'].includes(line.trim())) { code.classList.add('inert'); } else { code.addEventListener('click', function () { choose(i, code); }); }
            return code;
        });
        let start = 0;
        lines.concat('').forEach(function (line, end) {
            if (line.trim()) { return; }
            if (!wrong.some(function (i) { return i >= start && i < end; })) { made.slice(start, end + 1).forEach(function (code) { code.classList.add('elsewhere'); }); }
            start = end + 1;
        });
        return element('pre', { class: 'catches-lines' }, ...made);
    }

    // What the usual checks say of a version.
    function usualOf(version) {
        const usual = version.seen.length ? `${listed(version.seen)} find${version.seen.length === 1 ? 's' : ''} a mistake.`
            : 'None of the seven usual checks finds a mistake.';
        const unfit = (version.unfit || []).length ? ` ${listed(version.unfit)} reject${version.unfit.length === 1 ? 's' : ''} the correct version too.` : '';
        return `${usual[0].toUpperCase()}${usual.slice(1)}${unfit}`;
    }

    // What gradcheck says of it in other calls, and what check_backward says.
    function diagnosisOf(version) {
        const calls = !version.calls ? ''
            : `gradcheck finds it in ${version.calls.includes(';') ? 'other calls' : 'another call'}: ${version.calls.replaceAll(';', ',')}. `;
        const own = version.right ? 'check_backward accepts it.'
            : `check_backward rejects it in the kind of call “${version.try}”${version.said ? `: ${version.said}` : '.'}`;
        return `${calls}${own}`;
    }

    // The lines that an edit takes away and adds.
    function diffOf(lines) {
        return element('code', {}, ...lines.map(function ([sign, text]) {
            return element('span', { class: sign === '+' ? 'added' : 'taken' }, `${sign === '+' ? '+' : '−'} ${text}\n`);
        }));
    }

    function catches(place) {
        const table = place.querySelector('table.catches');
        const data = JSON.parse(place.querySelector('.catches-data').textContent);
        const solved = new Set();
        const said = element('p', { role: 'status', class: 'catches-said' });
        const dialog = element('dialog', { class: 'catches-dialog', 'aria-label': 'A wrong backward pass' });

        // One row of the table becomes buttons: arrow keys walk through them, Tab passes the table by. A name that tells the mistake waits.
        const bugRows = [...table.tBodies[0].rows].filter(function (row) { return !row.classList.contains('kind'); });
        const grid = bugRows.map(function (row, r) {
            row.cells[0].querySelector('span').textContent = data.bugs[r].hidden;
            return [...row.cells].map(function (cell, c) {
                const words = c ? `${data.bugs[r].hidden}, ${data.checks[c - 1]}: ${data.states[cell.classList[0]]}` : `open ${data.bugs[r].hidden}`;
                const made = element('button', { type: 'button', tabindex: -1, 'aria-label': words }, ...cell.childNodes);
                made.addEventListener('click', function () { open(r, c); });
                made.addEventListener('keydown', function (event) {
                    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] || [0, 0];
                    let next = made, row = r, column = c;
                    do { next = (grid[row += down] || [])[column += right]; } while ((down || right) && next && !next.offsetParent);
                    if ((down || right) && next) { event.preventDefault(); next.tabIndex = 0; made.tabIndex = -1; next.focus(); }
                });
                cell.replaceChildren(made);
                return made;
            });
        });
        grid[0][0].tabIndex = 0;

        function shownBugs() { return data.bugs.map(function (_, r) { return r; }).filter(function (r) { return bugRows[r].offsetParent; }); }

        function isFound(r, column) { return grid[r][column + 1].parentNode.classList.contains('found'); }

        // Fill a share of the table, column by column from the left; the totals count what is filled.
        function fill(share) {
            const shown = shownBugs(), columns = [...table.tHead.rows[1].cells].flatMap(function (head, c) { return c && head.offsetParent ? [c] : []; });
            columns.forEach(function (c, place) {
                const end = (share * columns.length - place) * shown.length;
                const found = shown.filter(function (r, i) { return i < end && isFound(r, c - 1); }).length;
                table.querySelectorAll('tr.total').forEach(function (row) { row.cells[c].textContent = found; });
                shown.forEach(function (r, i) { grid[r][c].parentNode.classList.toggle('to-come', i >= end); });
            });
        }

        // Fill the table once, when it comes into view; a click, or a key in the table, shows all at once.
        function play() {
            let start = performance.now();
            function finish() { start = -Infinity; fill(1); }
            document.addEventListener('click', finish, { capture: true, once: true });
            table.addEventListener('keydown', finish, { once: true });
            (function step() {
                const share = Math.min((performance.now() - start) / 3000, 1);
                fill(share);
                if (share < 1) { requestAnimationFrame(step); }
            })();
        }

        function show() {
            const shown = shownBugs(), gradcheck = [...data.checks.keys()].filter(function (c) { return c === 0 || (c >= data.usual && c < data.checks.length - 1); });
            table.querySelectorAll('tr.total').forEach(function (row) { row.cells[0].textContent = `finds, of ${shown.length}`; });
            fill(1);
            table.tHead.rows[0].cells[1].colSpan = [...table.tHead.rows[1].cells].filter(function (cell, c) { return c && c <= data.usual && cell.offsetParent; }).length;
            const left = shown.filter(function (r) { return !gradcheck.some(function (c) { return isFound(r, c); }); }).length;
            said.textContent = `After all these calls of gradcheck, ${left} of ${shown.length} are left.${solved.size ? ` You have solved ${solved.size}.` : ''}`;
            all.textContent = table.classList.contains('accepted') ? `Show all ${data.bugs.length}` : 'Only what one call does not find';
        }

        // `asked` is the column of a clicked square; the dialog says first whether that check finds the mistake.
        function open(number, asked) {
            const bug = data.bugs[number];
            const finding = bug.lines.length > 0;
            const answer = asked ? [element('p', {}, element('strong', {}, data.checks[asked - 1]),
                ` ${data.states[grid[number][asked].parentNode.classList[0]].replace(/ it$/, ' this mistake')}.`)] : [];
            const verdict = element('div', { role: 'status', class: 'catches-verdict' });
            const links = bug.source ? [bug.report ? ' ' : ' A public report of a similar mistake: ',
                element('a', { href: bug.source }, bug.report || bug.source.replace('https://', '')), '.'] : [];
            // The name and what goes wrong would give the bug away: they are told after the first choice of an edit, the edits after the line.
            const effect = element('p', {}, ...withCode(bug.effect), ...links);
            const title = element('strong', {}, bug.hidden);
            const ask = element('strong', { role: 'status' }, 'Click on the line that is wrong.');
            const choices = element('div', { class: 'catches-choices' });
            let misses = 0;
            function tellName() {
                title.textContent = bug.name;
                bugRows[number].cells[0].querySelector('span').textContent = bug.name;
                grid[number][0].setAttribute('aria-label', `open ${bug.name}`);
            }
            function solve() {
                solved.add(number);
                bugRows[number].classList.add('mended');
                show();
                place.dataset.mended = String(solved.size);
            }
            // After the line: the six edits, or what a report says and its correction.
            function goOn(words) {
                ask.textContent = bug.report ? words || 'This is the correction.'
                    : `${words}Choose an edit that fixes it; there may be several. Green: check_backward accepts the edit; orange: it does not.`;
                skip.hidden = true;
                choices.hidden = false;
                code.classList.add('known');
                bug.lines.forEach(function (line) { code.children[line].classList.add('right'); });
                if (bug.report) { tellName(); }
            }
            const skip = button(bug.report ? 'Show the correction' : 'Show the six edits', function () { goOn(''); });
            skip.hidden = choices.hidden = true;
            effect.hidden = true;
            if (bug.report) { choices.append(element('div', { class: 'correction' }, diffOf(bug.correction)), element('p', {}, ...withCode(bug.story), ...links)); }
            bug.edits.forEach(function (edit, i) {
                const made = element('button', { type: 'button', 'aria-pressed': 'false', 'aria-label': `edit ${i + 1}: ` +
                    edit.diff.filter(function ([sign]) { return sign === '+'; }).map(function ([, text]) { return text; }).join('; ') },
                    diffOf(edit.diff));
                made.addEventListener('click', function () {
                    choices.querySelectorAll('button').forEach(function (other) { other.setAttribute('aria-pressed', String(other === made)); });
                    made.after(verdict);
                    effect.hidden = false;
                    tellName();
                    made.classList.add(edit.right ? 'right' : 'wrong');
                    verdict.className = `catches-verdict ${edit.right ? 'right' : 'wrong'}`;
                    verdict.replaceChildren(element('p', {}, `${edit.right ? 'Fixed.'
                        : edit.stricter ? 'As PyTorch’s own dropout, which makes NaN of infinity times zero too; check_backward is stricter.'
                            : 'Still wrong.'} ${usualOf(edit)} ${diagnosisOf(edit)}`));
                    if (edit.right) {
                        solve();
                        verdict.append(element('p', {}, element('strong', {}, 'The mistake: '), ...withCode(bug.story)));
                    }
                    verdict.scrollIntoView({ block: 'nearest' });
                });
                choices.append(made);
            });
            const shown = shownBugs();
            const step = function (by) { return function () { open(shown[(shown.indexOf(number) + by + shown.length) % shown.length], asked); }; };
            const code = codeLines(bug.code, bug.lines, function (line, made) {
                const right = bug.lines.includes(line);
                made.classList.add(right ? 'right' : 'wrong');
                if (right) {
                    if (bug.report && choices.hidden) { solve(); }
                    goOn(bug.report ? 'Yes: the correction changes this line.' : 'Yes: a correction changes this line. ');
                } else if (choices.hidden) {
                    misses += 1;
                    skip.hidden = misses < 2;
                    ask.textContent = 'No, not this line. Click on another.';
                }
            });
            if (!finding) { goOn('A line is missing. '); }
            const held = dialog.open ? document.activeElement.textContent : '';
            code.tabIndex = 0;
            const buttons = [button('Back', step(-1)), button('Next', step(1)), button('Close', function () { dialog.close(); })];
            dialog.replaceChildren(
                element('div', { class: 'player-buttons' }, title, `${shown.indexOf(number) + 1} of ${shown.length}`, ...buttons),
                ...answer,
                element('p', {}, ask, ' ', skip),
                element('div', { class: 'catches-bug' },
                    element('div', {}, code, element('p', { class: 'catches-note' }, helpersIn(bug.code)), element('p', {}, usualOf(bug)),
                        element('details', {}, element('summary', {}, 'A hint: what other checks say'), element('p', {}, diagnosisOf(bug)))),
                    element('div', { class: 'catches-edits' }, ...(bug.report ? [] : [effect]), choices, verdict)));
            if (!dialog.open) { dialog.showModal(); }
            // Whoever leafs with Next keeps it under the finger; everybody else begins at the code.
            (buttons.find(function (made) { return made.textContent === held; }) || code).focus({ preventScroll: true });
            dialog.scrollTop = 0;
            place.dataset.open = bug.name;
        }

        dialog.addEventListener('click', function (event) { if (event.target === dialog) { dialog.close(); } });
        const all = button('', function () { table.classList.toggle('accepted'); show(); });
        bugRows.forEach(function (row) { row.classList.toggle('caught', row.cells[1].classList.contains('found')); });
        table.classList.add('accepted');
        const attempt = button('Let me try one', function () {
            const shown = shownBugs(), unsolved = shown.filter(function (r) { return !solved.has(r); });
            const rest = unsolved.length ? unsolved : shown;
            open(rest[Math.floor(Math.random() * rest.length)]);
        });
        attempt.classList.add('main');
        place.prepend(element('div', { class: 'player-buttons' }, attempt, all), said);
        place.append(dialog);
        show();
        if (CALM) { return; }
        new IntersectionObserver(function ([entry], watch) {
            if (entry.isIntersecting) { watch.disconnect(); play(); }
        }, { rootMargin: '0px 0px -15%' }).observe(table.tBodies[0]);
    }

    // ---- A step that unlearns -------------------------------------------------------------------------------------

    // Acts at each place of a picture that a held pointer comes to, in the picture's own units.
    function whileHeld(picture, act) {
        function actHere(event) {
            if (!picture.hasPointerCapture(event.pointerId)) { return; }
            act(new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse()));
        }
        picture.addEventListener('pointerdown', function (event) {
            picture.setPointerCapture(event.pointerId);
            actHere(event);
        });
        picture.addEventListener('pointermove', actHere);
    }

    // The number of the least value.
    function leastOf(values) { return values.indexOf(Math.min(...values)); }

    // A drawn chart of the loss, and a function that moves a dot to a place on its line; a click or drag on the chart goes to a place.
    function lossChart(place, go) {
        const chart = place.querySelector('svg'), dot = shape('circle', { r: 6, class: 'tip' });
        const at = [...chart.querySelector('polyline').points].map(function (point) { return { x: point.x, y: point.y }; });
        chart.append(dot);
        whileHeld(chart, function (here) { go(leastOf(at.map(function (point) { return Math.abs(point.x - here.x); }))); });
        return [chart, function (index) { dot.setAttribute('cx', at[index].x); dot.setAttribute('cy', at[index].y); }];
    }

    // Bars of the next byte's probability, from 0.001% to 100%, each with a mark at the untrained one, and a function that fills them.
    function shareBars(data) {
        const logarithm = function (share) { return `${(Math.max(0, Math.log10(share) + 5) * 20).toFixed(1)}%`; };
        const bars = element('div', { class: 'unlearning-bars' }, element('p', {}, 'Probability of the right byte',
            element('small', {}, 'geometric mean over the positions where this byte comes next; logarithmic scale; mark: untrained')));
        const rows = data.names.map(function (name, i) {
            const bar = element('i', {}), said = element('output', {});
            const mark = element('b', { style: `left: ${logarithm(data.untrained[i])}` });
            bars.append(element('div', {}, element('span', {}, name), element('span', {}, bar, mark), said));
            return [bar, said];
        });
        return [bars, function (index) {
            data.shares[index].forEach(function (share, i) {
                rows[i][0].style.width = logarithm(share);
                rows[i][1].textContent = share < 1e-5 ? '<0.001%' : `${Number((share * 100).toPrecision(share < 0.0995 ? 1 : 2))}%`;
            });
        }];
    }

    // The run's shared vector in a plane, what LayerNorm makes of it, the loss of one batch, and what the model predicts.
    function unlearning(place) {
        const data = JSON.parse(place.querySelector('script').textContent);
        const points = data.points, last = points.length - 1;
        const worst = leastOf(points.map(function (point) { return -point[1]; }));
        const [reach, rise, room] = [2, 3, 4].map(function (column) { return Math.max(...points.map(function (p) { return p[column]; })); });
        const width = 340, scale = (width - 24) / (reach + room), wide = Math.max(rise, room) * scale;
        const zero = { x: room * scale + 4, y: wide + 50 }, height = zero.y + room * scale + 22, inset = { x: width - 42, y: 62 }, full = 28;
        const [chart, mark] = lossChart(place, go), [bars, fill] = shareBars(data);
        // The line of the loss ends where the reader has been: what it does next is asked.
        const line = chart.querySelector('polyline'), drawn = line.getAttribute('points').split(' ');
        const begin = Math.max(worst - 30, 0), asked = worst - 8, half = worst - 5, recent = points.findIndex(function (p) { return p[0] === 13; });
        let now = 0, seen = 0, timer = null;

        function onPlane(point) { return [zero.x + point[2] * scale, zero.y - point[3] * scale]; }
        function way(some) { return some.map(function (p) { return onPlane(p).map(function (v) { return v.toFixed(1); }).join(','); }).join(' '); }
        const plane = shape('svg', { viewBox: `0 0 ${width} ${height}`, class: 'unlearning-plane' });
        const raw = shape('line', { x1: zero.x, y1: zero.y, class: 'vector' }), disc = shape('circle', { cx: zero.x, cy: zero.y, class: 'disc' });
        const normed = shape('line', { x1: inset.x, y1: inset.y, class: 'normed' });
        const tip = shape('circle', { r: 8, class: 'tip' }), normedTip = shape('circle', { r: 5, class: 'normed-tip' });
        const offsets = { 7: [-3, -9], 13: [8, 12], 14: [-16, -8], 15: [-20, -4], 16: [-6, 18], 17: [-4, -9] };
        const unit = width - 10 * scale - 10;
        plane.append(disc, shape('line', { x1: 0, x2: width, y1: zero.y, y2: zero.y, class: 'axis' }),
            shape('line', { x1: zero.x, x2: zero.x, y1: 22, y2: height - 20, class: 'axis' }),
            shape('polyline', { points: way(points.slice(0, recent + 1)), class: 'trail early' }),
            shape('polyline', { points: way(points.slice(recent)), class: 'trail' }), raw,
            ...points.filter(function (p) { return p[0] in offsets; }).flatMap(function (p) {
                const [x, y] = onPlane(p), [right, down] = offsets[p[0]];
                return [shape('circle', { cx: x, cy: y, r: 3, class: 'update' }), shape('text', { x: x + right, y: y + down }, String(p[0]))];
            }), tip, shape('circle', { cx: inset.x, cy: inset.y, r: full, class: 'ring' }), normed, normedTip,
            shape('text', { x: 2, y: 12 }, 'the shared vector after each update'),
            shape('text', { x: zero.x + 5, y: 33 }, '↑ turned by update 15'),
            shape('text', { x: width - 2, y: zero.y + 34, 'text-anchor': 'end' }, 'direction before update 15 →'),
            shape('line', { x1: unit, x2: unit + 10 * scale, y1: height - 12, y2: height - 12, class: 'unit' }),
            shape('text', { x: unit + 5 * scale, y: height - 18, 'text-anchor': 'middle' }, 'length 10'),
            shape('text', { x: 2, y: height - 6 }, 'grey: the spread between positions'),
            shape('text', { x: width - 2, y: 26, class: 'normed-words', 'text-anchor': 'end' }, 'after LayerNorm'));

        const slider = element('input', { type: 'range', min: 0, max: last, step: 1, value: 0, 'aria-label': 'update' });
        const facts = element('p', { role: 'status' });

        function show(index) {
            now = index;
            seen = Math.max(seen, index);
            line.setAttribute('points', drawn.slice(0, seen + 1).join(' '));
            const point = points[index], [x, y] = onPlane(point), length = Math.hypot(point[2], point[3]) || 1;
            raw.setAttribute('x2', x); raw.setAttribute('y2', y);
            tip.setAttribute('cx', x); tip.setAttribute('cy', y);
            disc.setAttribute('r', point[4] * scale);
            const nx = inset.x + point[2] / length * full, ny = inset.y - point[3] / length * full;
            normed.setAttribute('x2', nx); normed.setAttribute('y2', ny);
            normedTip.setAttribute('cx', nx); normedTip.setAttribute('cy', ny);
            mark(index);
            fill(index);
            slider.value = index;
            const whole = point[0] === Math.round(point[0]);
            facts.textContent = `${whole ? `After update ${point[0]}` : `On the way to update ${Math.ceil(point[0])}`}: loss ${point[1].toFixed(2)}, ` +
                `length ${point[5].toFixed(1)}, spread ${point[4].toFixed(1)}, ratio ${(point[5] / point[4]).toFixed(1)}.`;
            place.dataset.loss = String(point[1]);
        }

        function stop() { clearInterval(timer); timer = null; }

        function go(index) { stop(); show(index); }

        // The way passes some places twice: of near ones, the next in the run.
        whileHeld(plane, function (here) {
            go(leastOf(points.map(function (p, i) {
                const [x, y] = onPlane(p);
                return Math.hypot(x - here.x, y - here.y) + Math.abs(i - now) * 0.9;
            })));
        });
        slider.addEventListener('input', function () { go(Number(slider.value)); });

        // It stops before the jump, for the question, and at the worst point; it goes on from there when it is played again.
        function play() {
            stop();
            if (now === last) { show(begin); }
            animate([asked, worst, last].find(function (place) { return place > now; }));
        }

        function animate(end) {
            if (CALM) { show(end); return; }
            timer = setInterval(function () {
                show(now + 1);
                if (now === end) { stop(); }
            }, now >= asked && now < worst ? 240 : 120);
        }

        const reply = element('p', { role: 'status' });
        function answer(words) {
            const made = button(words, function () {
                answers.forEach(function (other) { other.setAttribute('aria-pressed', String(other === made)); });
                const [loss, , , spread] = points[half].slice(1);
                reply.textContent = `${words === 'about 4' ? 'Yes' : 'No'}: it is ${loss.toFixed(2)}. The last LayerNorm hides the length, ` +
                    `but the spread has grown from ${points[asked][4].toFixed(1)} to ${spread.toFixed(1)}. Play shows the rest of the update.`;
                go(asked);
                animate(half);
            });
            return made;
        }

        const answers = [`still ${points[asked][1].toFixed(2)}`, 'about 4', 'above 5.55'].map(answer);

        function jump(words, index) { return button(words, function () { go(index); }); }
        place.replaceChildren(
            element('div', { class: 'player-buttons' }, button('Play', play), button('Stop', stop), jump('After update 14', asked),
                jump('After 15', worst), jump('After 16', worst + 8)),
            element('div', { class: 'player-buttons' }, 'When update 15 has shortened the vector to about half, is the loss',
                ...answers, '?'), reply,
            element('div', { class: 'unlearning plane-first' }, plane, chart), slider, facts, bars, place.querySelector('figcaption'));
        show(begin);
        play();
    }

    // The loss and the predictions for each scale of the shared vector.
    function scales(place) {
        const data = JSON.parse(place.querySelector('script').textContent);
        const [chart, mark] = lossChart(place, show), [bars, fill] = shareBars(data);
        const slider = element('input', { type: 'range', min: 0, max: data.points.length - 1, step: 1, value: 0, 'aria-label': 'scale' });
        const facts = element('p', { role: 'status' });

        function show(index) {
            const [ratio, loss, scale] = data.points[index];
            mark(index);
            fill(index);
            const rise = Math.round(100 * (loss - data.points[0][1])) / 100 || 0;
            facts.textContent = (`Ratio ${ratio.toFixed(1)}, ${scale.toFixed(2)} times the vector: loss ${loss.toFixed(2)}, ` +
                `a rise of ${rise.toFixed(2)}.`).replaceAll('-', '−');
            place.dataset.loss = String(loss);
        }

        slider.addEventListener('input', function () { show(Number(slider.value)); });
        place.replaceChildren(element('div', { class: 'unlearning' }, chart, bars), slider, facts, place.querySelector('figcaption'));
        show(0);
    }

    // ---- Make it fast, backwards too ------------------------------------------------------------------------------

    // The time of both passes step by step, beside the picture of each step, which stands further down on the page.
    function climb(place) {
        const stops = JSON.parse(place.querySelector('.climb-data').textContent);
        const chart = place.querySelector('svg'), dots = [...chart.querySelectorAll('.stop')];
        const pairs = [...document.querySelectorAll('.pair')].map(function (pair) { return [...pair.querySelectorAll('svg')]; });
        const headings = [...document.querySelectorAll('h2[id]')].filter(function (heading) { return /^\d/.test(heading.id); });
        const here = shape('circle', { r: 9, class: 'tip' }), picture = element('div', { class: 'climb-picture' });
        const title = element('a', { class: 'climb-title' }), facts = element('p', { role: 'status' }), figure = place.querySelector('figure');
        const slider = element('input', { type: 'range', min: 0, max: stops.length - 1, step: 1, 'aria-label': 'steps done' });
        let now = 0, frame = 0, frames = 1, timer = null, opening = !CALM;
        chart.append(here);

        // Without the margins, letters are larger.
        function crop(svg) {
            const box = svg.getBBox();
            svg.setAttribute('viewBox', `${box.x - 2} ${box.y - 2} ${box.width + 4} ${box.height + 4}`);
        }

        // Frame 0 is the drawing "before"; the others are those of the one "after".
        function draw(number) {
            frame = number;
            const svg = pairs[Math.max(now - 1, 0)][Math.min(number, 1)].cloneNode(true);  // without a step, the code of step 1 as given
            svg.querySelectorAll('[data-from]').forEach(function (group) {
                const shown = Number(group.dataset.from) < number && number <= Number(group.dataset.to) + 1;
                group.setAttribute('visibility', shown ? 'visible' : 'hidden');
            });
            picture.replaceChildren(svg);
            crop(svg);
        }

        function show(index, moving) {
            now = index;
            const stop = stops[index];
            here.setAttribute('cx', dots[index].getAttribute('cx'));
            here.setAttribute('cy', dots[index].getAttribute('cy'));
            title.textContent = stop.title;
            if (index) { title.href = '#' + headings[index - 1].id; } else { title.removeAttribute('href'); }
            facts.textContent = `Both passes: ${stop.time}.` + (index ? ` ${stop.counter}. ${stop.change}.` : ' Every kernel is in its first form.');
            const groups = index ? [...pairs[index - 1][1].querySelectorAll('[data-to]')] : [];
            frames = index ? 2 + Math.max(0, ...groups.map(function (group) { return Number(group.dataset.to); })) : 1;
            draw(moving ? 0 : frames - 1);
            slider.value = index;
            place.dataset.step = String(index);
        }

        function stop() { clearInterval(timer); timer = null; opening = false; }

        // The first play shows each step once; those that the reader asks for also show the code before it.
        function play(first) {
            stop();
            if (CALM) { show(stops.length - 1); return; }
            if (now === stops.length - 1) { show(0); }
            timer = setInterval(function () {
                if (now && frame < frames - 1) { draw(frame + 1); return; }
                if (now === stops.length - 1) { stop(); return; }
                show(now + 1, !first);
            }, first ? 900 : 1300);
        }

        function go(index) { stop(); show(index); }
        slider.addEventListener('input', function () { go(Number(slider.value)); });
        dots.forEach(function (dot, index) { dot.addEventListener('click', function () { go(index); }); });
        place.prepend(element('div', { class: 'player-buttons' }, button('Play', function () { play(false); }), button('Stop', stop),
            button('Back', function () { go(Math.max(now - 1, 0)); }), button('Next', function () { go(Math.min(now + 1, stops.length - 1)); })));
        figure.prepend(element('div', {}, chart, slider, facts), element('div', { class: 'climb-step' }, title, picture));
        show(opening ? 0 : stops.length - 1);
        new IntersectionObserver(function ([entry]) {
            if (opening && entry.intersectionRatio >= 0.25) { play(true); }
            if (timer && !entry.isIntersecting) { go(stops.length - 1); }
        }, { threshold: [0, 0.25] }).observe(place);
    }

    const PLAYERS = { 'break-the-gradient': breakTheGradient, 'block-orders': blockOrders, catches, unlearning, scales, climb };
    document.querySelectorAll('[data-player]').forEach(function (place) {
        PLAYERS[place.dataset.player](place);
        // Elsewhere on a page the arrow keys turn to the next chapter.
        place.addEventListener('keydown', function (event) { event.stopPropagation(); });
        place.classList.add('player-ready');
    });
})();
