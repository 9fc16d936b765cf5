"""The style sheet of the page: light and dark, wide and narrow, screen and paper."""

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5b6675;--rule:#e1e5ea;--grid:#eceff3;
--s1:#0b66b2;--s2:#c8520a;--s3:#7a4fb0;--s4:#0a7d5e;--s5:#b0305f;--s6:#8a94a1;--band:#f2b70540;--edge:#d99c00;
--fail:#b3261e;--warn:#9a5b00;--note:#0b66b2;--ok:#0a7d5e;--info:#5b6675;
--fail-back:#fdecea;--warn-back:#fff3dc;--note-back:#e8f2fb;--ok-back:#e3f5ee;--info-back:#eef1f4}
@media screen and (prefers-color-scheme:dark){
:root{--page:#11151b;--card:#191f27;--ink:#e6eaf0;--soft:#9aa6b5;--rule:#2b333e;
--grid:#252c36;--s1:#62b0f0;--s2:#f79a55;--s3:#b99be8;--s4:#4fcba3;--s5:#f084ab;--s6:#8390a0;--band:#f2c94c30;--edge:#d9a93a;
--fail:#ff8a80;--warn:#f5b95f;--note:#7cbcf5;--ok:#5fd3a9;--info:#9aa6b5;
--fail-back:#3a1f1f;--warn-back:#35290f;--note-back:#16293b;--ok-back:#12301f;--info-back:#232a33}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
article{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 4px}
h3{font-size:14px;margin:20px 0 4px}
p{margin:0 0 8px}
a{color:var(--s1)}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.source{color:var(--soft);margin:4px 0;overflow-wrap:anywhere}
header{margin-bottom:14px}
section,.verdict{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:18px 20px;
margin:0 0 14px}
.verdict{display:flex;gap:16px;align-items:center;border-left:6px solid var(--level);background:var(--back)}
.verdict b{font-size:20px;letter-spacing:.02em;color:var(--level);white-space:nowrap}
.fail{--level:var(--fail);--back:var(--fail-back)}.warn{--level:var(--warn);--back:var(--warn-back)}
.note{--level:var(--note);--back:var(--note-back)}.ok{--level:var(--ok);--back:var(--ok-back)}
.info{--level:var(--info);--back:var(--info-back)}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:0 0 14px}
.tile{flex:1 1 150px;max-width:240px;
background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:10px 14px}
.tile span{display:block;color:var(--soft);font-size:13px}.tile b{font-size:20px;font-weight:650}
.tile small{color:var(--soft);font-size:13px;display:block}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 14px;font-size:14px}
.finding{border-left:4px solid var(--level);padding:2px 0 2px 14px;margin:14px 0 0}
.finding h3{margin:0;font-size:16px;line-height:1.35}
.badge{display:inline-block;font-size:12px;font-weight:700;color:var(--level);background:var(--back);border-radius:5px;
padding:0 7px;margin-right:8px;text-transform:uppercase;letter-spacing:.03em}
.finding details{margin:2px 0 0}.finding summary{font-weight:400;overflow-wrap:anywhere}
.finding p{margin:3px 0 0}.finding ul{margin:4px 0 0;padding-left:18px;color:var(--soft)}
.where,.lead,.notes{color:var(--soft)}
.do b{color:var(--level)}
.notes{margin:10px 0 0;padding-left:18px}
details{margin-top:12px}summary{cursor:pointer;color:var(--soft);font-weight:600}
.scroll{overflow-x:auto;margin-top:10px;max-width:100%}
table{border-collapse:collapse;font-size:13.5px}
th{text-align:left;color:var(--soft);font-weight:600;white-space:nowrap;border-bottom:1px solid var(--rule)}
td{border-bottom:1px solid var(--grid);vertical-align:top;overflow-wrap:break-word}
th,td{padding:5px 26px 5px 0}th:last-child,td:last-child{padding-right:0}
th.n,td.n{text-align:right;white-space:nowrap}
td.w{min-width:86px;max-width:340px}td.long{min-width:320px;max-width:420px}
td.pass{color:var(--ok);font-weight:650}td.unknown{color:var(--soft)}td.fail{color:var(--fail);font-weight:650}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:6px 26px}
.groups{display:flex;flex-wrap:wrap;gap:0 20px}.group{flex:0 1 calc(var(--n)*200px);min-width:0;
display:flex;flex-direction:column}
.group>.row{margin-top:auto}
.row.small{grid-template-columns:repeat(auto-fill,minmax(180px,1fr));gap:4px 20px}
figure{margin:14px 0 0;min-width:0;display:flex;flex-direction:column;justify-content:flex-end}
figcaption{font-weight:650;font-size:14px;overflow-wrap:anywhere}
.small figcaption{font-size:13px;font-weight:600}
figcaption .unit,.key{color:var(--soft);font-weight:400;font-size:13px}
.key{display:flex;flex-wrap:wrap;gap:0 14px}
.key i{display:inline-block;width:14px;height:3px;border-radius:2px;background:currentColor;margin-right:6px;
vertical-align:middle}
.key i.band{height:11px;background:var(--band);border:1px solid var(--edge)}
.plot{padding:22px 108px 26px 46px}.small .plot{padding:8px 6px 24px 40px}.pair .plot{padding-right:14px}
.small .wide{display:none}
svg.panel{display:block;width:100%;overflow:visible}
svg.panel svg{overflow:visible}
path{fill:none;stroke:currentColor;stroke-width:1.6;vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
path.raw{opacity:.32;stroke-width:1}path.mid{opacity:.7;stroke-width:1.3}path.bold{stroke-width:2.2}
path.thin{stroke-width:1.2}
.small path.raw{opacity:.4}
path.area{fill:currentColor;fill-opacity:.75;stroke:var(--card);stroke-width:.8}
.s1{color:var(--s1)}.s2{color:var(--s2)}.s3{color:var(--s3)}.s4{color:var(--s4)}.s5{color:var(--s5)}
.s6{color:var(--s6)}
circle{fill:var(--card);stroke:currentColor;stroke-width:2}
svg text{font-size:12px;fill:var(--soft)}
text.end{fill:currentColor;font-weight:650}
.grid{stroke:var(--grid)}.axis{stroke:var(--rule)}
text.y{text-anchor:end}text.x{text-anchor:middle}
rect.band{fill:var(--band);stroke:var(--edge);stroke-opacity:.55;stroke-width:1.5}
.checkpoint,.best{stroke-dasharray:2 4}line.checkpoint{stroke:var(--rule)}
line.best{stroke:var(--s4);stroke-dasharray:5 3}
text.sign{text-anchor:middle;font-size:10px}text.sign.best,.key .best{fill:var(--s4);color:var(--s4)}
text.sign.best{font-size:12px;font-weight:650}
text.bad{fill:var(--fail);text-anchor:middle;font-weight:700;font-size:15px}
rect.look{fill:transparent}rect.look:hover{fill:var(--ink);fill-opacity:.06}
footer{color:var(--soft);font-size:13px}
@media (max-width:640px){article{padding:16px 10px 40px}section,.verdict{padding:14px 12px}.tile{padding:8px 10px}
.group{flex-basis:100%}.verdict{display:block}.verdict b{display:block}
.row.small{grid-template-columns:1fr 1fr;gap:4px 10px}.plot{padding:22px 92px 26px 40px}
.small .plot{padding-left:36px}.pair .plot{padding-right:14px}
.wide{display:none}.tile{flex-basis:40%}text.end{font-size:11px}}
@media print{body{background:#fff}section,.verdict,.tile{break-inside:avoid;border-color:#ccc}nav{display:none}
.scroll{overflow:visible}table{font-size:9px}th,td{padding-right:8px}
td.n,th.n{white-space:normal}td.w,td.long{min-width:0;overflow-wrap:anywhere}
details::details-content{content-visibility:visible;display:block;height:auto}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
