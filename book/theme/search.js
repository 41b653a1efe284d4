// Makes the search index in the reader's browser, when somebody first searches: the texts are a third of the bytes of an
// index that holds them too. The build puts this function in front of the texts: [address, title, headings above and title, body].
function makeSearch(options, texts) {
    // Formulas are in the index by the names of their letters; the library's trimmer takes a Greek letter for none.
    const greek = { α: 'alpha', β: 'beta', γ: 'gamma', δ: 'delta', ε: 'epsilon', λ: 'lambda', μ: 'mu', σ: 'sigma' };
    const trim = elasticlunr.trimmer;
    elasticlunr.trimmer = function (word) { return trim(word.replace(/[α-ω]/g, function (letter) { return greek[letter] || letter; })); };
    elasticlunr.trimmer.label = 'trimmer';
    elasticlunr.Pipeline.registeredFunctions.trimmer = elasticlunr.trimmer;
    const index = elasticlunr(function () {
        this.setRef('id');
        ['title', 'body'].forEach(this.addField, this);
    });
    // Each word is reduced to its stem once; the book repeats most of them.
    const reduce = index.pipeline.run.bind(index.pipeline), known = new Map();
    index.pipeline.run = function (words) {
        return words.flatMap(function (word) {
            if (!known.has(word)) { known.set(word, reduce([word])); }
            return known.get(word);
        });
    };
    texts.forEach(function ([, title, breadcrumbs, body], id) { index.addDoc({ id: String(id), title, breadcrumbs, body }); });
    return Object.assign(options, { doc_urls: texts.map(function (text) { return text[0]; }), index: index.toJSON() });
}
