"""The style sheet of a report: light and dark from one set of names."""

STYLE = """
:root{color-scheme:light dark;
--paper:#ffffff;--ink:#1c2128;--quiet:#5b6470;--line:#e3e6ea;--soft:#f5f6f8;--focus:#1f6feb;
--forward:#3b78d8;--gradient:#d9762b;--update:#23956d;--workspace:#98a1ad;--bad:#c9302c;
--c3:#8a63c9;--c4:#c2488c;--c5:#0f93a8;--c6:#9a8419;--c7:#7b8794;
--h0:#eef3fb;--h1:#d9e5f7;--h2:#bfd4f1;--h3:#9fbfe9;--h4:#7ba6df;--h5:#568bd2;--h6:#366fbe;--h7:#2255a0;--h8:#143c7c}
@media screen and (prefers-color-scheme:dark){:root{
--paper:#14171c;--ink:#e4e8ee;--quiet:#9aa4b1;--line:#2c323b;--soft:#1c2027;--focus:#6ea8fe;
--forward:#5f9bf0;--gradient:#e8934f;--update:#45b98d;--workspace:#707a87;--bad:#f0716b;
--c3:#ad8cf0;--c4:#e57ab5;--c5:#42bfd4;--c6:#cdb64a;--c7:#9aa4b1;
--h0:#1d2530;--h1:#21344d;--h2:#26446b;--h3:#2c568b;--h4:#366aab;--h5:#4a82c8;--h6:#6b9edd;--h7:#98bdec;--h8:#cfe1f8}}
*{box-sizing:border-box}
html{scroll-padding-top:46px}
body{margin:0;background:var(--paper);color:var(--ink);line-height:1.5;font-size:15px;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
header,main,footer{max-width:1140px;margin:0 auto;padding:0 24px}
header{padding-top:40px}
h1{font-size:clamp(22px,5.4vw,30px);line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0 0 6px;
overflow-wrap:anywhere}
header p,footer{color:var(--quiet)}header p{margin:0}
.score{color:var(--quiet);font-weight:400;display:inline-block;padding-left:.35em}
@media (max-width:560px){.score{display:block;padding:0}}
.score b{color:var(--ink);font-weight:650}
h2{font-size:20px;font-weight:650;letter-spacing:-.01em;margin:0 0 10px}
section{padding:30px 0 6px}
section+section{border-top:1px solid var(--line);margin-top:26px}
h3{font-size:15px;font-weight:600;margin:22px 0 6px}
.lead{max-width:74ch;margin:0 0 14px;color:var(--quiet)}.lead b{color:var(--ink);font-weight:600}
.figures{display:flex;flex-wrap:wrap;gap:14px 40px;margin:26px 0 22px}
.figures dt{color:var(--quiet);font-size:13px}
.figures dd{margin:0;font-size:24px;font-weight:600;letter-spacing:-.01em;line-height:1.3}
.figures .remark{font-size:13px;max-width:25ch;line-height:1.35;font-weight:400;color:var(--quiet);letter-spacing:0;
min-height:1.3em}
nav{position:sticky;top:0;z-index:2;background:var(--paper);border-block:1px solid var(--line);
display:flex;gap:6px;padding:8px max(16px,calc((100% - 1108px)/2));overflow-x:auto}
nav a{color:var(--quiet);text-decoration:none;padding:4px 10px;border-radius:6px;font-size:14px;white-space:nowrap}
nav a:hover,nav a[aria-current]{color:var(--ink);background:var(--soft)}
:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
footer{padding-block:30px 50px;font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:18px 28px}
figure{margin:0}.readout{font-size:13px;color:var(--quiet);min-height:1.5em;padding-left:52px;overflow-wrap:anywhere}
.readout b{color:var(--ink);font-weight:600}
.chart{display:block;width:100%;height:auto;font-size:12px}
.chart text{fill:var(--quiet)}.chart .name,.chart .label,.chart .value{fill:var(--ink)}
.chart .tick{font-size:11px}.chart .bad{fill:var(--bad);font-size:11px}
.grid{stroke:var(--line);stroke-width:1}.cross{stroke:var(--quiet);stroke-width:1}
.lost{stroke:var(--bad);stroke-width:1;stroke-dasharray:2 3}
polyline,.chart line[class^=c]:not(.cross){fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.c0{stroke:var(--forward)}.c1{stroke:var(--gradient)}.c2{stroke:var(--update)}.c3{stroke:var(--c3)}
.c4{stroke:var(--c4)}.c5{stroke:var(--c5)}.c6{stroke:var(--c6)}.c7{stroke:var(--c7)}
.dash:not(circle){stroke-dasharray:5 4}
circle.c0{fill:var(--forward)}circle.c1{fill:var(--gradient)}circle.c2{fill:var(--update)}circle.c3{fill:var(--c3)}
circle.c4{fill:var(--c4)}circle.c5{fill:var(--c5)}circle.c6{fill:var(--c6)}circle.c7{fill:var(--c7)}
.band{stroke:none}.band.c0{fill:var(--forward);fill-opacity:.16}.band.c1{fill:var(--gradient);fill-opacity:.16}
.h0{fill:var(--h0)}.h1{fill:var(--h1)}.h2{fill:var(--h2)}.h3{fill:var(--h3)}.h4{fill:var(--h4)}.h5{fill:var(--h5)}
.h6{fill:var(--h6)}.h7{fill:var(--h7)}.h8{fill:var(--h8)}.hz{fill:var(--line)}.hx{fill:var(--bad)}
.legend{display:flex;flex-wrap:wrap;align-items:center;gap:6px 20px;font-size:13px;color:var(--quiet);margin:0 0 12px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px;vertical-align:-1px}
button{font:inherit;font-size:13px;color:var(--ink);background:var(--soft);
border:1px solid var(--line);border-radius:6px;padding:3px 12px;cursor:pointer;margin-left:auto}
button[aria-pressed=true]{border-color:var(--focus)}
i.forward{background:var(--forward)}i.gradient{background:var(--gradient)}i.update{background:var(--update)}
i.workspace{background:var(--workspace)}
i.f-input,i.f-group{background:#7d8590}i.f-weights{background:#3b82d8}i.f-map{background:#2f9e7a}
i.f-move{background:#9a7fd1}i.f-loss{background:#d9694a}
.wide,#arena{overflow-x:auto}.heat,.memory{min-width:680px}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:5px 14px 5px 0;text-align:left;font-weight:400;white-space:nowrap;border-bottom:1px solid var(--line)}
tbody th{font-weight:500;white-space:normal;overflow-wrap:break-word;max-width:280px}
thead th{color:var(--quiet);font-size:12px}
tfoot th,tfoot td{font-weight:600;border-bottom:0}
.n{text-align:right}
td:last-child,th:last-child{padding-right:4px}
.times th[scope=row]{max-width:230px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.bars{width:46%;min-width:200px}.bars i{display:inline-block;height:14px;vertical-align:middle}
.bars i+i{border-left:1px solid var(--paper)}
.bars i:first-child{border-radius:3px 0 0 3px}.bars i:last-child{border-radius:0 3px 3px 0}
details{margin-top:14px}summary{cursor:pointer;color:var(--quiet);font-size:14px;width:max-content;max-width:100%}
details[open] summary{margin-bottom:8px}
.confusion .right{fill:var(--forward)}.confusion .wrong{fill:var(--gradient)}.confusion .none{fill:var(--soft)}
.confusion .count{fill:var(--ink);font-size:12px}.confusion .on{fill:#fff}.confusion .value{fill:var(--quiet)}
.wrong-ones{display:grid;grid-template-columns:minmax(0,auto) minmax(260px,1fr);gap:10px 48px;align-items:start}
@media (max-width:900px){.wrong-ones{grid-template-columns:1fr}}
.wrong-ones h3{margin-top:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(84px,1fr));gap:14px 12px}
.tiles.plain{grid-template-columns:repeat(auto-fill,minmax(150px,1fr))}
.tiles img{display:block;width:100%;aspect-ratio:1;object-fit:contain;image-rendering:pixelated;
background:var(--soft);border-radius:8px}
.tiles figcaption{font-size:13px;color:var(--quiet);margin-top:6px;line-height:1.4;overflow-wrap:anywhere}
.tiles b{color:var(--ink);font-weight:600}.tiles span{display:block}
.setup{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:0 44px}
.setup.many{grid-template-columns:minmax(0,1fr)}.setup.many td{min-width:9em}.setup h3{margin-top:10px}
.setup td{white-space:pre-line;overflow-wrap:anywhere}.setup tr>*{vertical-align:top}
.setup th[scope=row]{color:var(--quiet);font-weight:400;width:1%;
white-space:nowrap;padding-right:22px}
.differs td{color:var(--ink);font-weight:600}.many tr:not(.differs) td{color:var(--quiet)}
main a{color:inherit;text-decoration-color:var(--quiet);text-underline-offset:3px}
.dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:9px;background:var(--c7)}
.d0{background:var(--forward)}.d1{background:var(--gradient)}.d2{background:var(--update)}.d3{background:var(--c3)}
.d4{background:var(--c4)}.d5{background:var(--c5)}.d6{background:var(--c6)}
.live{display:flex;align-items:center;gap:8px 12px;flex-wrap:wrap;font-size:14px;color:var(--quiet);margin:0 0 22px}
.lamp{width:9px;height:9px;border-radius:50%;background:var(--workspace);flex:none}
.lamp.on{background:var(--update)}.lamp.gone{background:var(--bad)}.lamp.over{background:var(--forward)}
@media (prefers-reduced-motion:no-preference){.lamp.on{animation:beat 2s ease-in-out infinite}}
@keyframes beat{50%{opacity:.35}}
.live progress{appearance:none;height:4px;border:0;border-radius:2px;overflow:hidden;flex:1 1 120px;max-width:320px;
background:var(--line)}.live progress::-webkit-progress-bar{background:var(--line)}
.live progress::-webkit-progress-value{background:var(--update)}
.live progress::-moz-progress-bar{background:var(--update)}
.buttons{margin-left:auto;display:flex;gap:8px}.buttons button{margin:0}
button:hover:enabled{border-color:var(--quiet)}button:disabled{opacity:.5;cursor:default}
.map{border-radius:6px}
.memory rect{fill-opacity:.62;stroke:var(--paper);stroke-width:.7}
.memory .thin{stroke:none}
.memory .forward{fill:var(--forward)}.memory .gradient{fill:var(--gradient)}.memory .update{fill:var(--update)}
.memory .workspace{fill:var(--workspace)}.memory .strip{fill-opacity:1;stroke:none}
.memory .kept{fill-opacity:.85}
.memory .chosen{fill-opacity:1;stroke:var(--ink);stroke-width:1.6}
.memory rect[data-tensor]{cursor:pointer}
.use{fill:var(--ink);fill-opacity:.12;stroke:none}.peak{stroke:var(--quiet);stroke-dasharray:2 3}
.detail{background:var(--soft);border-radius:8px;padding:12px 16px;font-size:14px;color:var(--quiet);min-height:96px}
#tensor{margin-top:10px;min-height:104px}
.detail h3{margin:0 0 4px;font-size:15px;font-weight:600;color:var(--ink);overflow-wrap:anywhere}
.detail dl,dl:not(.figures){display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0}
.detail dt,dl:not(.figures) dt{color:var(--quiet)}
.detail dd,dl:not(.figures) dd{margin:0;color:var(--ink);overflow-wrap:anywhere}
#layers td:last-child:not(.n){overflow-wrap:anywhere;white-space:normal;min-width:220px}
#layers dl{margin-top:14px;font-size:13px}
.graph{display:grid;grid-template-columns:minmax(0,1fr) 320px;gap:20px;align-items:start}
.canvas{max-height:720px;overflow:auto;border:1px solid var(--line);border-radius:8px;text-align:center}
.canvas svg{margin:0 auto}
.graph aside{position:sticky;top:64px}
[data-box]{cursor:pointer;outline:none}
[data-box]:focus-visible .o,[data-box].chosen .o{stroke:var(--focus)!important;stroke-width:2.6!important}
@media (max-width:820px){.graph{grid-template-columns:1fr}.graph aside{position:static}
header,main,footer{padding-inline:16px}}
body:not(.scripted) .needs-script{display:none}
@media print{nav,.detail,body .needs-script{display:none}.canvas{max-height:none;border:0}
:root{color-scheme:light}.wide{overflow:visible}td:not(.n),#layers td:last-child:not(.n){white-space:normal;min-width:0}
.graph{grid-template-columns:1fr}figure,tr,.memory{break-inside:avoid}h2{break-after:avoid}
.legend i,.bars i{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
