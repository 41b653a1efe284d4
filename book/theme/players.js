// Two things to play with: the gradient of LayerNorm, and the order of blocks in a race. Each takes the place of a still picture,
// which is what a reader without scripts sees. Nothing is fetched.
(function () {
    'use strict';

    const SVG = 'http://www.w3.org/2000/svg';

    function element(name, attributes, ...children) {
        const made = document.createElement(name);
        Object.entries(attributes || {}).forEach(function ([key, value]) { made.setAttribute(key, value); });
        made.append(...children);
        return made;
    }

    function shape(name, attributes, text) {
        const made = document.createElementNS(SVG, name);
        Object.entries(attributes).forEach(function ([key, value]) { made.setAttribute(key, value); });
        if (text !== undefined) { made.textContent = text; }
        return made;
    }

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
                        value.toFixed(2)));
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
                return row[0] + ' ' + row[1].map(function (v) { return v.toFixed(2); }).join(', ');
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
        const facts = element('p', { role: 'status' });
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
                element('div', {}, element('p', {}, 'What g is made of'), barRows([
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
                `For the outline, ${choice.value}, these are ${number(wrongSum)} and ${number(wrongAlong)}.`;
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
        place.replaceChildren(buttons, inputs, pictures, facts);
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
        let order = Array.from({ length: BLOCKS }, function (_, i) { return i; });
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
                    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
                    if (step) { event.preventDefault(); move(at, at + step); }
                    if (event.key === 'Home') { event.preventDefault(); move(at, 0); }
                    if (event.key === 'End') { event.preventDefault(); move(at, BLOCKS - 1); }
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
                ? `The sum is ${sum}, as it should be.` + (apart.checked ? ' In every order.' : ' In this order.')
                : `The sum is ${sum} and should be ${BLOCKS}: ${lost} addition${lost === 1 ? ' is' : 's are'} lost.`;
            place.dataset.sum = String(sum);
        }

        function shuffled() {
            const left = order.slice(), made = [];
            while (left.length) { made.push(left.splice(Math.floor(Math.random() * left.length), 1)[0]); }
            return made;
        }

        place.replaceChildren(
            element('div', { class: 'player-buttons' },
                button('Natural', function () { order.sort(function (a, b) { return a - b; }); show(); }),
                button('Reversed', function () { order.sort(function (a, b) { return b - a; }); show(); }),
                button('Shuffle', function () { order = shuffled(); show(); }),
                element('label', {}, apart, ' clear in a separate launch')),
            row, facts);
        show();
    }

    const PLAYERS = { 'break-the-gradient': breakTheGradient, 'block-orders': blockOrders };
    document.querySelectorAll('[data-player]').forEach(function (place) {
        PLAYERS[place.dataset.player](place);
        // Elsewhere on a page the arrow keys turn to the next chapter.
        place.addEventListener('keydown', function (event) { event.stopPropagation(); });
        place.classList.add('player-ready');
    });
})();
