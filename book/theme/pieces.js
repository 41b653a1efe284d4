// The figures of three pages that stand by themselves: the matrix of "What gradcheck misses", the vector of "A step that
// unlearns", and the climb of "Make it fast, backwards too". Without scripts there is a table and a still picture. Nothing is fetched; all data stands in the page.
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
                    verdict.textContent = `${edit.right ? 'Fixed.' : 'Still wrong.'} ${verdictOf(edit)}`;
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
                element('p', {}, element('strong', {}, 'Six edits, of which at least one fixes it.')),
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

    // ---- A step that unlearns -------------------------------------------------------------------------------------

    const SVG = 'http://www.w3.org/2000/svg';

    function shape(name, attributes, text) {
        const made = document.createElementNS(SVG, name);
        Object.entries(attributes).forEach(function ([key, value]) { made.setAttribute(key, value); });
        if (text !== undefined) { made.textContent = text; }
        return made;
    }

    // The run's shared vector in a plane, what LayerNorm makes of it, the loss of one batch, and what the model predicts.
    function unlearning(place) {
        const data = JSON.parse(place.querySelector('.unlearning-data').textContent);
        const points = data.points, last = points.length - 1;
        const worst = points.reduce(function (best, point, i) { return point[1] > points[best][1] ? i : best; }, 0);
        const size = 300, reach = Math.max(...points.map(function (p) { return Math.hypot(p[2], p[3]); })) * 1.05;
        const zero = { x: size * 0.22, y: size * 0.55 }, scale = (size - zero.x - 12) / reach, full = 92;
        let now = 0, direction = 1, timer = null;

        function onPlane(point) { return [zero.x + point[2] * scale, zero.y - point[3] * scale]; }
        const plane = shape('svg', { viewBox: `0 0 ${size} ${size}`, class: 'unlearning-plane' });
        const trail = points.map(function (p) { return onPlane(p).map(function (v) { return v.toFixed(1); }).join(','); }).join(' ');
        const raw = shape('line', { x1: zero.x, y1: zero.y, class: 'vector' });
        const normed = shape('line', { x1: zero.x, y1: zero.y, class: 'normed' });
        const tip = shape('circle', { r: 9, class: 'tip' }), normedTip = shape('circle', { r: 5, class: 'normed-tip' });
        plane.append(shape('circle', { cx: zero.x, cy: zero.y, r: full, class: 'ring' }),
            shape('line', { x1: 0, x2: size, y1: zero.y, y2: zero.y, class: 'axis' }),
            shape('line', { x1: zero.x, x2: zero.x, y1: 24, y2: size - 24, class: 'axis' }),
            shape('polyline', { points: trail, class: 'trail' }), normed, raw, tip, normedTip,
            shape('text', { x: 6, y: 16 }, 'the vector that all positions share'),
            shape('text', { x: 6, y: size - 8, class: 'normed-words' }, 'the same after LayerNorm'));

        const curve = shape('svg', { viewBox: `0 0 ${size} 170`, class: 'unlearning-curve' });
        const low = Math.min(...points.map(function (p) { return p[1]; })), high = points[worst][1];
        function onCurve(point) {
            return [34 + (point[0] - points[0][0]) / (points[last][0] - points[0][0]) * (size - 46), 22 + (high - point[1]) / (high - low) * 116];
        }
        const dot = shape('circle', { r: 6, class: 'tip' });
        curve.append(shape('polyline', { class: 'trail', points: points.map(function (p) { return onCurve(p).join(','); }).join(' ') }), dot,
            shape('text', { x: 0, y: 14 }, 'loss of one batch, in nats'), shape('text', { x: 0, y: onCurve(points[worst])[1] + 12 }, high.toFixed(1)),
            shape('text', { x: 0, y: onCurve(points[last])[1] }, low.toFixed(1)), shape('text', { x: size / 2, y: 166 }, 'updates'));
        points.forEach(function (p) {
            if (p[0] === Math.round(p[0])) { curve.append(shape('text', { x: onCurve(p)[0], y: 154, 'text-anchor': 'middle' }, String(p[0]))); }
        });

        const bars = element('div', { class: 'unlearning-bars' }, element('p', {}, 'what the model predicts, on average'));
        const rows = data.names.map(function (name) {
            const bar = element('i', {}), said = element('output', {});
            bars.append(element('div', {}, element('span', {}, name), bar, said));
            return [bar, said];
        });
        const slider = element('input', { type: 'range', min: 0, max: last, step: 1, value: 0, 'aria-label': 'place in the run' });
        const facts = element('p', { role: 'status' });

        function show(index) {
            now = index;
            const point = points[index], [x, y] = onPlane(point), length = Math.hypot(point[2], point[3]) || 1;
            raw.setAttribute('x2', x); raw.setAttribute('y2', y);
            tip.setAttribute('cx', x); tip.setAttribute('cy', y);
            const [nx, ny] = [zero.x + point[2] / length * full, zero.y - point[3] / length * full];
            normed.setAttribute('x2', nx); normed.setAttribute('y2', ny);
            normedTip.setAttribute('cx', nx); normedTip.setAttribute('cy', ny);
            const [cx, cy] = onCurve(point);
            dot.setAttribute('cx', cx); dot.setAttribute('cy', cy);
            data.shares[index].forEach(function (share, i) {
                rows[i][0].style.width = `${Math.min(100, share * 120).toFixed(1)}%`;
                rows[i][1].textContent = `${(share * 100).toFixed(0)}%`;
            });
            slider.value = index;
            const whole = point[0] === Math.round(point[0]);
            facts.textContent = `${whole ? `After update ${point[0]}` : `Within update ${Math.ceil(point[0])}`}: loss ${point[1].toFixed(2)}, ` +
                `length of the vector ${length.toFixed(1)}.`;
            place.dataset.loss = String(point[1]);
        }

        function stop() { clearInterval(timer); timer = null; }

        function nearest(event) {
            const box = plane.getBoundingClientRect();
            const x = (event.clientX - box.left) / box.width * size, y = (event.clientY - box.top) / box.height * size;
            // The way passes some places twice: of near ones, the next in the run.
            let best = now, least = Infinity;
            points.forEach(function (p, i) {
                const [px, py] = onPlane(p), far = Math.hypot(px - x, py - y) + Math.abs(i - now) * 0.9;
                if (far < least) { least = far; best = i; }
            });
            return best;
        }

        plane.addEventListener('pointerdown', function (event) {
            stop();
            plane.setPointerCapture(event.pointerId);
            show(nearest(event));
        });
        plane.addEventListener('pointermove', function (event) { if (plane.hasPointerCapture(event.pointerId)) { show(nearest(event)); } });
        slider.addEventListener('input', function () { stop(); show(Number(slider.value)); });

        function play() {
            stop();
            if (CALM) { show(worst); return; }
            timer = setInterval(function () {
                if (now + direction < 0 || now + direction > last) { direction = -direction; }
                show(now + direction);
            }, 120);
        }

        place.replaceChildren(
            element('div', { class: 'player-buttons' }, button('Play', play), button('Stop', stop),
                button('Before the step', function () { stop(); show(worst - 8); }), button('After it', function () { stop(); show(worst); }),
                button('One update later', function () { stop(); show(worst + 8); })),
            element('div', { class: 'unlearning' }, plane, element('div', {}, curve, bars)), slider, facts);
        show(worst - 30 > 0 ? worst - 30 : 0);
        play();
    }

    // ---- Make it fast, backwards too ------------------------------------------------------------------------------

    // The time of both passes step by step, beside the picture of each step, which stands further down on the page.
    function climb(place) {
        const stops = JSON.parse(place.querySelector('.climb-data').textContent);
        const chart = place.querySelector('svg'), dots = [...chart.querySelectorAll('.stop')];
        const drawings = [...document.querySelectorAll('.hero svg')];
        const here = shape('circle', { r: 9, class: 'tip' }), picture = element('div', { class: 'climb-picture' });
        const title = element('strong', {}), facts = element('p', { role: 'status' }), figure = place.querySelector('figure');
        const slider = element('input', { type: 'range', min: 0, max: stops.length - 1, step: 1, 'aria-label': 'steps done' });
        let now = 0, frame = 0, frames = 1, timer = null;
        chart.append(here);

        function draw(number) {
            frame = number;
            picture.querySelectorAll('[data-from]').forEach(function (group) {
                const shown = Number(group.dataset.from) <= frame && frame <= Number(group.dataset.to);
                group.setAttribute('visibility', shown ? 'visible' : 'hidden');
            });
        }

        function show(index, moving) {
            now = index;
            const stop = stops[index], drawing = drawings[index - 1];
            here.setAttribute('cx', dots[index].getAttribute('cx'));
            here.setAttribute('cy', dots[index].getAttribute('cy'));
            title.textContent = stop.title;
            facts.textContent = `Both passes: ${stop.time}.` + (index ? ` ${stop.counter}; ${stop.change}.` : ' Every kernel is in its first form.');
            picture.replaceChildren(...(drawing ? [drawing.cloneNode(true)] : []));
            frames = 1 + Math.max(0, ...[...picture.querySelectorAll('[data-to]')].map(function (group) { return Number(group.dataset.to); }));
            draw(moving ? 0 : frames - 1);
            slider.value = index;
            place.dataset.step = String(index);
        }

        function stop() { clearInterval(timer); timer = null; }

        function play() {
            stop();
            if (CALM) { show(stops.length - 1); return; }
            if (now === stops.length - 1) { show(0, true); }
            timer = setInterval(function () {
                if (frame < frames - 1) { draw(frame + 1); return; }
                show((now + 1) % stops.length, true);
            }, 1300);
        }

        function go(index) { stop(); show(index); }
        slider.addEventListener('input', function () { go(Number(slider.value)); });
        dots.forEach(function (dot, index) { dot.addEventListener('click', function () { go(index); }); });
        place.prepend(element('div', { class: 'player-buttons' }, button('Play', play), button('Stop', stop),
            button('Back', function () { go(Math.max(now - 1, 0)); }), button('Next', function () { go(Math.min(now + 1, stops.length - 1)); })));
        figure.prepend(element('div', {}, chart, slider, facts), element('div', { class: 'climb-step' }, title, picture));
        show(0, true);
        play();
    }

    const PLAYERS = { catches, unlearning, climb };
    document.querySelectorAll('[data-piece]').forEach(function (place) {
        PLAYERS[place.dataset.piece](place);
        // Elsewhere on a page the arrow keys turn to the next chapter.
        place.addEventListener('keydown', function (event) { event.stopPropagation(); });
        place.classList.add('player-ready');
    });
})();
