"""The script of a report: pointing, choosing, sorting. Everything it shows is also on the page without it."""

SCRIPT = r"""
(function () {
  'use strict';
  var data = JSON.parse(document.getElementById('data').textContent);
  document.body.classList.add('scripted');

  function each(selector, action, root) {
    Array.prototype.forEach.call((root || document).querySelectorAll(selector), action);
  }
  // Text only ever becomes text: labels may contain anything.
  function make(tag, text) {
    var element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  function show(panel, heading, facts) {
    panel.textContent = '';
    panel.appendChild(make('h3', heading));
    var list = panel.appendChild(make('dl'));
    facts.forEach(function (fact) {
      list.appendChild(make('dt', fact[0]));
      list.appendChild(make('dd', fact[1]));
    });
  }
  function short(value) {
    return value === null ? 'not finite' : String(Number(value.toPrecision(4)));
  }

  // Curves: the numbers at the pointer, or at the place the arrow keys have reached. A live page replaces the picture.
  var again = [];
  function follow(figure) {
    var index = Number(figure.dataset.chart), place = -1;
    var readout = figure.querySelector('.readout');
    function longest() {
      return data.charts[index].lines.map(function (line) { return line.points; })
        .reduce(function (a, b) { return b.length > a.length ? b : a; });
    }
    function mark(to) {
      var points = longest(), chart = data.charts[index], cross = figure.querySelector('.cross');
      if (!points.length) return;
      place = Math.max(0, Math.min(points.length - 1, to));
      var at = points[place];
      cross.setAttribute('x1', at[0]);
      cross.setAttribute('x2', at[0]);
      cross.setAttribute('visibility', 'visible');
      readout.textContent = '';
      readout.appendChild(make('span', chart.x + ' ' + Math.round(at[1])));
      chart.lines.forEach(function (line) {
        var near = null;
        line.points.forEach(function (point) {
          if (near === null || Math.abs(point[0] - at[0]) < Math.abs(near[0] - at[0])) near = point;
        });
        if (near === null || Math.abs(near[1] - at[1]) > 0.75 && chart.x === 'epoch') return;
        readout.appendChild(make('span', ' · ' + line.name + ' '));
        readout.appendChild(make('b', short(near[2])));
      });
    }
    figure.addEventListener('pointermove', function (event) {
      var box = figure.querySelector('svg').getBoundingClientRect(), points = longest(), best = 0;
      var x = (event.clientX - box.left) / box.width * data.charts[index].width;
      points.forEach(function (point, at) { if (Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = at; });
      mark(best);
    });
    figure.addEventListener('keydown', function (event) {
      var by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by === undefined && event.key !== 'Home' && event.key !== 'End') return;
      event.preventDefault();
      mark(event.key === 'Home' ? 0 : event.key === 'End' ? longest().length - 1 : place + by);
    });
    again[index] = function () { if (place >= 0) mark(place); };
  }
  each('figure.plot', follow);

  // Memory: which tensor lies there.
  var map = document.getElementById('arena');
  if (map) {
    var panel = document.getElementById('tensor'), rects = [];
    var chosen = -1, held = false, names = ['type', 'size', 'place', 'lives'];
    var pick = function (index) {
      if (!rects.length) return;
      if (chosen >= 0) rects[chosen].classList.remove('chosen');
      chosen = (index + rects.length) % rects.length;
      rects[chosen].classList.add('chosen');
      var facts = data.tensors[chosen];
      show(panel, facts[0], names.map(function (name, at) { return [name, facts[at + 1]]; }));
    };
    each('[data-tensor]', function (rect) {
      var index = Number(rect.dataset.tensor);
      rects[index] = rect;
      rect.addEventListener('pointerenter', function () { if (!held) pick(index); });
      rect.addEventListener('click', function () { held = !(held && chosen === index); pick(index); });
    }, map);
    map.addEventListener('keydown', function (event) {
      var by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      if (by === undefined) {
        if (event.key === 'Escape') held = false;
        return;
      }
      event.preventDefault();
      held = true;
      pick(chosen < 0 ? 0 : chosen + by);
    });
  }

  // The graph: what a box stands for. A wide one is seen from its middle, where its first boxes are.
  each('.canvas', function (canvas) { canvas.scrollLeft = (canvas.scrollWidth - canvas.clientWidth) / 2; });
  var boxes = document.querySelectorAll('[data-box]'), side = document.getElementById('layer');
  function choose(index, focus) {
    each('[data-box].chosen', function (box) { box.classList.remove('chosen'); box.setAttribute('tabindex', '-1'); });
    var box = boxes[index], facts = data.boxes[index];
    boxes[0].setAttribute('tabindex', '-1');
    box.classList.add('chosen');
    box.setAttribute('tabindex', '0');
    if (focus) box.focus();
    show(side, facts[0][1], facts.slice(1));
  }
  Array.prototype.forEach.call(boxes, function (box, index) {
    box.addEventListener('click', function () { choose(index, true); });
    box.addEventListener('focus', function () { if (!box.classList.contains('chosen')) choose(index, false); });
    box.addEventListener('keydown', function (event) {
      var by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      var to = event.key === 'Home' ? 0 : event.key === 'End' ? boxes.length - 1 : by === undefined ? -1 : index + by;
      if (event.key === 'Enter' || event.key === ' ') to = index;
      if (to < 0 || to >= boxes.length) return;
      event.preventDefault();
      choose(to, true);
    });
  });

  // Times: in the order of the graph, or the slowest first.
  var sort = document.getElementById('sort');
  if (sort) sort.addEventListener('click', function () {
    var slowest = sort.getAttribute('aria-pressed') !== 'true';
    var body = document.querySelector('.times tbody');
    sort.setAttribute('aria-pressed', String(slowest));
    Array.prototype.slice.call(body.rows).sort(function (a, b) {
      return slowest ? b.dataset.time - a.dataset.time : a.dataset.order - b.dataset.order;
    }).forEach(function (row) { body.appendChild(row); });
  });

  // Navigation: the part one is looking at.
  if (window.IntersectionObserver) {
    var seen = new IntersectionObserver(function (entries) {
      entries.forEach(function (entry) {
        if (entry.isIntersecting) each('nav a', function (link) {
          if (link.getAttribute('href') === '#' + entry.target.id) link.setAttribute('aria-current', 'true');
          else link.removeAttribute('aria-current');
        });
      });
    }, { rootMargin: '-20% 0px -70% 0px' });
    each('section', function (section) { seen.observe(section); });
  }
/*live*/})();
"""

#: What a page does in addition while a server tells it how training goes on: new pictures, and two buttons.
LIVE = r"""
  var state = document.getElementById('state'), lamp = document.getElementById('lamp'), source = null, over = false;
  var buttons = Array.prototype.slice.call(document.querySelectorAll('.buttons button'));
  function say(text, kind) {
    if (state.textContent !== text) state.textContent = text;
    lamp.className = 'lamp ' + kind;
  }
  function enable(yes) { buttons.forEach(function (button) { button.disabled = !yes; }); }
  // The server escapes what it sends as the report does; both are drawn by the same code.
  function parse(html) {
    var holder = document.createElement('template');
    holder.innerHTML = html;
    return holder.content;
  }
  function show_part(name, html) {
    var part = document.querySelector('#' + name + ' .part');
    if (!part) return;
    var fresh = parse(html);
    var before = part.querySelectorAll('figure.plot'), after = fresh.querySelectorAll('figure.plot');
    if (!before.length || before.length !== after.length) {
      part.replaceChildren(fresh);
      each('figure.plot', follow, part);
      return;
    }
    Array.prototype.forEach.call(after, function (figure, index) {
      before[index].querySelector('svg').replaceWith(figure.querySelector('svg'));
      again[index]();
    });
    var was = part.querySelector('details'), now = fresh.querySelector('details');
    if (was && now) {
      now.open = was.open;
      was.replaceWith(now);
    }
  }
  function update(event) {
    var news = JSON.parse(event.data);
    say(news.state, news.kind);
    document.getElementById('done').value = news.done;
    if (news.title) document.title = news.title;
    if (news.heading) document.getElementById('heading').replaceChildren(parse(news.heading));
    if (news.figures) document.getElementById('figures').replaceChildren(parse(news.figures));
    if (news.charts) data.charts = news.charts;
    Object.keys(news.parts || {}).forEach(function (name) { show_part(name, news.parts[name]); });
    over = news.over;
    enable(!over && !news.stopping);
    if (over && source) {
      source.close();
      source = null;
    }
  }
  function connect() {
    if (over || source) return;
    source = new EventSource('events');
    source.onmessage = update;
    source.onerror = function () {
      enable(false);
      say('not connected: training has ended, or its program is gone; the page stays as it is', 'gone');
    };
  }
  function send(name) {
    return function () {
      fetch(name, { method: 'POST', headers: { 'X-Requested-With': 'mlcompute' } }).then(function (answer) {
        return answer.text();
      }).then(function (text) { say(text, 'on'); }, function () { say('not connected', 'gone'); });
      if (name === 'stop') enable(false);
    };
  }
  buttons.forEach(function (button) { button.addEventListener('click', send(button.id)); });
  // Nobody looks: nothing needs to be drawn.
  document.addEventListener('visibilitychange', function () {
    if (document.hidden && source) {
      source.close();
      source = null;
    } else if (!document.hidden) connect();
  });
  connect();
"""
