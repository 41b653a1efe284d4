// What the workbook adds to mdBook's behaviour: Mojo highlighting, the
// stepper. Nothing here is needed to read the book.
(function () {
    'use strict';

    function highlightMojo() {
        if (typeof hljs === 'undefined') { return; }
        hljs.registerLanguage('mojo', function (h) {
            return {
                keywords: {
                    keyword: 'and as break comptime continue def deinit elif else except finally for from if ' +
                        'import in is mut not or out pass raise raises read ref return struct thin trait try ' +
                        'var where while with yield',
                    literal: 'True False None',
                    built_in: 'Bool DType Float64 Float32 Int Int32 List Scalar SIMD Self StaticString String ' +
                        'range len min max print self',
                },
                contains: [
                    h.HASH_COMMENT_MODE,
                    { className: 'string', variants: [
                        { begin: /"""/, end: /"""/ }, { begin: /'''/, end: /'''/ },
                        h.QUOTE_STRING_MODE, h.APOS_STRING_MODE] },
                    { className: 'number', begin: /\b(0[xX][\da-fA-F_]+|\d[\d_]*(\.\d[\d_]*)?([eE][-+]?\d+)?)/ },
                    { className: 'meta', begin: /^\s*@[\w.]+/ },
                    { className: 'function', beginKeywords: 'def', end: /[[(]/, excludeEnd: true,
                      contains: [h.UNDERSCORE_TITLE_MODE] },
                ],
            };
        });
        document.querySelectorAll('code.language-mojo').forEach(function (block) {
            block.innerHTML = hljs.highlight('mojo', block.textContent).value;
            block.classList.add('hljs');
        });
    }

    // A line of code that is too long goes on further to the right than it begins. A span of several lines is opened again in each.
    function hangLines(code) {
        const open = [];
        code.innerHTML = code.innerHTML.split('\n').map(function (line) {
            if (!line) { return ''; }
            const opened = open.join(''), indent = line.replace(/<[^>]*>/g, '').search(/[^\s+-]|$/) + 2;
            (line.match(/<\/?span[^>]*>/g) || []).forEach(function (tag) {
                if (tag[1] === '/') { open.pop(); } else { open.push(tag); }
            });
            return `<span class="code-line" style="--hang: ${indent}ch">${opened}${line}${'</span>'.repeat(open.length + 1)}`;
        }).join('\n');
    }

    // A row of a step's data lights up together with the formula and the lines of code that use its names.
    function linkRowsToCode(step) {
        const lines = Array.from(step.querySelectorAll('.code-line'));
        if (!lines.length) { return; } // a step of numbers alone
        const formula = step.querySelector('.math-display');
        step.querySelectorAll('tr[data-names]').forEach(function (row) {
            const names = row.dataset.names.split(' ').map(function (name) { return new RegExp('\\b' + name + '\\b'); });
            const used = lines.filter(function (line) {
                return names.every(function (name) { return name.test(line.textContent); });
            });
            function light(on) {
                [row, formula].concat(used).forEach(function (part) { part.classList.toggle('lit', on); });
            }
            row.tabIndex = 0;
            ['mouseenter', 'focus'].forEach(function (name) { row.addEventListener(name, function () { light(true); }); });
            ['mouseleave', 'blur'].forEach(function (name) { row.addEventListener(name, function () { light(false); }); });
        });
    }

    // The arrow keys, Home and End inside a place call `go` with a number from 0 to `last`, and do not turn to the next chapter.
    function onKeys(place, at, last, go) {
        place.addEventListener('keydown', function (event) {
            const to = { ArrowLeft: at() - 1, ArrowRight: at() + 1, Home: 0, End: last }[event.key];
            if (to === undefined) { return; }
            event.stopPropagation();
            event.preventDefault();
            go(Math.min(Math.max(to, 0), last));
        });
    }

    // Start, Back and Next, and a slider where there are many steps; the arrow keys, Home and End do the same anywhere inside, and do
    // not turn to the next chapter. Each step is announced. `show` is called with a step's number and returns its words.
    // Paper has the step that says most, `still`.
    function addControls(place, count, show, still) {
        const controls = document.createElement('div');
        controls.className = 'stepper-controls';
        controls.innerHTML = '<button type="button">Start</button><button type="button">Back</button><button type="button">Next</button>' +
            (count > 8 ? '<input type="range" min="0" step="1" aria-label="step">' : '') + '<span role="status" aria-live="polite"></span>';
        const [start, back, next] = controls.querySelectorAll('button');
        const slider = controls.querySelector('input'), status = controls.querySelector('span');
        let current = 0;
        function go(index) {
            current = Math.min(Math.max(index, 0), count - 1);
            start.disabled = back.disabled = current === 0;
            next.disabled = current === count - 1;
            if (slider) { slider.value = current; }
            status.textContent = (current + 1) + ' of ' + count + '. ' + show(current);
        }
        start.addEventListener('click', function () { go(0); });
        back.addEventListener('click', function () { go(current - 1); });
        next.addEventListener('click', function () { go(current + 1); });
        if (slider) {
            slider.max = count - 1;
            slider.addEventListener('input', function () { go(slider.valueAsNumber); });
        }
        onKeys(place, function () { return current; }, count - 1, go);
        place.prepend(controls);
        if (!place.hasAttribute('tabindex')) { place.tabIndex = 0; }
        place.classList.add('stepper-ready');
        let left = 0;
        window.addEventListener('beforeprint', function () { left = current; go(still); });
        window.addEventListener('afterprint', function () { go(left); });
        go(0);
    }

    function setUpSteppers() {
        document.querySelectorAll('.stepper').forEach(function (stepper) {
            const steps = Array.from(stepper.querySelectorAll('.step'));
            steps.forEach(linkRowsToCode);
            addControls(stepper, steps.length, function (index) {
                steps.forEach(function (step, i) { step.hidden = i !== index; });
                const title = steps[index].querySelector('strong');
                return title ? title.textContent : '';
            }, 0);
        });
    }

    // A drawing in steps: a group is shown from its data-from to its data-to, and the step's words stand beside the buttons.
    function setUpHeroes() {
        document.querySelectorAll('.hero').forEach(function (hero) {
            const words = Array.from(hero.querySelectorAll('.hero-steps > li'), function (li) { return li.textContent; });
            const groups = Array.from(hero.querySelectorAll('svg [data-from]'), function (group) {
                return [group, Number(group.dataset.from), Number(group.dataset.to)];
            });
            addControls(hero, words.length, function (index) {
                groups.forEach(function ([group, from, to]) {
                    group.setAttribute('visibility', from <= index && index <= to ? 'visible' : 'hidden');
                });
                hero.dataset.step = index;
                return words[index];
            }, Number(hero.dataset.still));
        });
    }

    // Answers to choose from: what is wrong or right with one is shown once it is chosen, and without scripts from the start.
    function setUpChoices() {
        document.querySelectorAll('.choice li').forEach(function (item) {
            const answer = document.createElement('button'), reply = item.lastElementChild;
            answer.type = 'button';
            while (item.firstChild !== reply) { answer.append(item.firstChild); }
            answer.querySelectorAll('a').forEach(function (link) { link.replaceWith(...link.childNodes); });
            item.prepend(answer);
            item.setAttribute('aria-live', 'polite');
            reply.hidden = true;
            answer.addEventListener('click', function () { reply.hidden = false; });
        });
    }

    // The marks of a museum: one stop of the Tab key, the arrow keys go from mark to mark, and the story of each is said below.
    function setUpMarks() {
        document.querySelectorAll('figure.marks').forEach(function (figure) {
            const marks = Array.from(figure.querySelectorAll('a[aria-label]')), story = figure.querySelector('output');
            function tell(mark) { story.textContent = mark.getAttribute('aria-label'); }
            marks.forEach(function (mark, index) {
                mark.setAttribute('tabindex', index ? -1 : 0);
                mark.addEventListener('focus', function () { tell(mark); });
                mark.addEventListener('mouseenter', function () { tell(mark); });
                onKeys(mark, function () { return index; }, marks.length - 1, function (to) { marks[to].focus(); });
            });
        });
    }

    // A row of a museum's table holds its exhibit from the first time that it is opened; a link to the row opens it.
    function setUpExhibits() {
        const kept = document.getElementById('exhibits');
        if (!kept) { return; }
        const exhibits = JSON.parse(kept.textContent);
        document.querySelectorAll('details[data-exhibit]').forEach(function (fold) {
            fold.addEventListener('toggle', function () {
                const name = fold.dataset.exhibit;
                if (!fold.open || !exhibits[name]) { return; }
                fold.querySelector(':scope > code').insertAdjacentHTML('beforebegin', exhibits[name]);
                delete exhibits[name];
                const code = fold.querySelector('pre code');
                if (typeof hljs !== 'undefined') { code.innerHTML = hljs.highlight('diff', code.textContent).value; }
                code.classList.add('hljs');
                hangLines(code);
            });
        });
        function openTarget() {
            const row = document.getElementById(location.hash.slice(1));
            const fold = row && row.querySelector('details[data-exhibit]');
            if (fold) { fold.open = true; }
        }
        window.addEventListener('hashchange', openTarget);
        openTarget();
    }

    // Paper has nothing to click: what is folded prints open.
    function openFoldsInPrint() {
        let opened = [];
        window.addEventListener('beforeprint', function () {
            opened = Array.from(document.querySelectorAll('details:not([open])'));
            opened.forEach(function (fold) { fold.open = true; });
        });
        window.addEventListener('afterprint', function () { opened.forEach(function (fold) { fold.open = false; }); });
    }

    // On a phone a wide figure is shown whole, and its letters are small: a tap, or Enter, enlarges it in a box that scrolls.
    function enlargeFigures() {
        const phone = window.matchMedia('(max-width: 600px)');
        document.querySelectorAll('main figure > svg:not(.narrow)').forEach(function (svg) {
            const figure = svg.parentElement;
            function turn() { if (phone.matches) { figure.classList.toggle('enlarged'); } }
            figure.classList.add('enlarges');
            svg.addEventListener('click', turn);
            svg.addEventListener('keydown', function (event) { if (event.key === 'Enter') { turn(); } });
            function reach() { if (phone.matches) { svg.tabIndex = 0; } else { svg.removeAttribute('tabindex'); } }
            phone.addEventListener('change', reach);
            reach();
        });
    }

    // A table or formula that goes on to the right says so by a fading edge, and can be scrolled by the arrow keys.
    function cueWide() {
        document.querySelectorAll('.table-wrapper, .math-display').forEach(function (box) {
            function cue() {
                const hidden = box.scrollWidth - box.clientWidth;
                box.classList.toggle('more', hidden - box.scrollLeft > 2);
                if (hidden > 2) { box.tabIndex = 0; } else { box.removeAttribute('tabindex'); }
            }
            box.addEventListener('scroll', cue, { passive: true });
            new ResizeObserver(cue).observe(box);
        });
    }

    highlightMojo();
    document.querySelectorAll('pre > code:is(.language-mojo, .language-python, .language-diff, .step *)').forEach(hangLines);
    setUpChoices();
    setUpMarks();
    setUpExhibits();
    enlargeFigures();
    cueWide();
    openFoldsInPrint();
    setUpSteppers();
    setUpHeroes();
})();
