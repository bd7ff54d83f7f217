"""The report page's style sheet: system fonts, light and dark, print. Nothing is fetched."""

STYLE = """
:root { color-scheme: light dark;
  --page:#f6f7f9; --card:#ffffff; --ink:#1b1f27; --soft:#5b6472; --rule:#dfe3ea; --grid:#e9ecf1;
  --track:#f0f2f6; --code:#f3f5f8; --s1:#2f6fde; --s2:#d9480f; --s3:#0f8a6c; --s4:#8b46c9;
  --forward:#4c8bf5; --recompute:#e3a008; --backward:#9b5de5; --optimizer:#1f9d74;
  --wait:#e5484d; --other:#9aa4b2; --inbar:#ffffff; --bad:#e5484d; }
@media (prefers-color-scheme: dark) { :root {
  --page:#12151b; --card:#1a1e26; --ink:#e6e9ef; --soft:#9aa4b4; --rule:#2c323d; --grid:#272d37;
  --track:#222731; --code:#14171d; --s1:#6ea3ff; --s2:#ff8a4c; --s3:#3fc79f; --s4:#bb8cf0;
  --forward:#5b93f0; --recompute:#d99a12; --backward:#a471ea; --optimizer:#2fae84;
  --wait:#f0616a; --other:#6d7786; --inbar:#0e1116; --bad:#f0616a; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; }
main { max-width:1180px; margin:0 auto; padding:28px 20px 60px; }
h1 { font-size:26px; margin:0 0 2px; overflow-wrap:anywhere; }
h2 { font-size:17px; margin:0 0 10px; }
h3 { font-size:13px; margin:14px 0 6px; color:var(--soft); font-weight:600; }
.lead, .caption, .empty { color:var(--soft); margin:0 0 12px; }
.head { display:flex; flex-wrap:wrap; justify-content:space-between; align-items:baseline; }
.caption { font-size:13px; margin:10px 0 0; max-width:92ch; }
section { background:var(--card); border:1px solid var(--rule); border-radius:10px;
  padding:18px 20px; margin-top:16px; min-width:0; }
.cards { display:grid; gap:12px; margin-top:18px;
  grid-template-columns:repeat(auto-fit,minmax(140px,1fr)); }
.card { background:var(--card); border:1px solid var(--rule); border-radius:10px;
  padding:11px 13px; }
.card b { display:block; font-size:22px; line-height:1.25; font-variant-numeric:tabular-nums; }
.card span { color:var(--soft); font-size:13px; }
.pair { display:grid; gap:16px;
  grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr)); }
.pair > section { margin-top:0; } .pair { margin-top:16px; }
.scroll { overflow-x:auto; }
svg { display:block; width:100%; height:auto; }
svg.timeline { min-width:860px; }
svg text { font:11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
  fill:var(--soft); }
svg text.rank { font-size:13px; font-weight:700; fill:var(--ink); }
svg text.lane { font-size:12px; }
svg text.inbar { fill:var(--inbar); pointer-events:none; }
.grid { stroke:var(--grid); } .axis { stroke:var(--soft); stroke-opacity:.6; }
.line { fill:none; stroke-width:2; stroke-linejoin:round; stroke-linecap:round; }
.line.faint { stroke-width:1; stroke-opacity:.32; }
.line.s1 { stroke:var(--s1); } .line.s2 { stroke:var(--s2); }
.line.s3 { stroke:var(--s3); } .line.s4 { stroke:var(--s4); }
.dot { stroke:var(--card); stroke-width:1; }
.s1 { fill:var(--s1); } .s2 { fill:var(--s2); } .s3 { fill:var(--s3); } .s4 { fill:var(--s4); }
path.line { fill:none; } .bad { fill:var(--bad); }
.hover { fill:transparent; } .hover:hover { fill:var(--soft); fill-opacity:.13; }
.track { fill:var(--track); } .b:hover { fill-opacity:.72; }
.forward { fill:var(--forward); background:var(--forward); }
.recompute { fill:var(--recompute); background:var(--recompute); }
.backward { fill:var(--backward); background:var(--backward); }
.optimizer { fill:var(--optimizer); background:var(--optimizer); }
.wait { fill:var(--wait); background:var(--wait); }
.other { fill:var(--other); background:var(--other); } .light { fill-opacity:.6; }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; margin:0 0 10px; padding:0; list-style:none;
  color:var(--soft); font-size:13px; }
.legend i { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:6px; }
i.s1 { background:var(--s1); } i.s2 { background:var(--s2); }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; font-size:14px; }
th, td { text-align:right; padding:4px 10px; border-bottom:1px solid var(--rule);
  white-space:nowrap; }
th { color:var(--soft); font-weight:600; font-size:13px; }
th:first-child, td:first-child, td.name, th.name { text-align:left; }
td.sub { padding-left:26px; color:var(--soft); } tr.total td { font-weight:700; border-bottom:0; }
.split { display:flex; height:9px; min-width:110px; border-radius:3px; overflow:hidden;
  background:var(--track); }
.split i { display:block; height:100%; } .hid { background:var(--optimizer); }
.bars { display:grid; grid-template-columns:max-content 1fr max-content; gap:7px 12px;
  align-items:center; font-size:14px; font-variant-numeric:tabular-nums; }
.bars .bar { background:var(--track); border-radius:3px; }
.bars .bar i { display:block; height:14px; border-radius:3px; background:var(--s1); min-width:2px; }
.bars .value { text-align:right; } .bars .sum { font-weight:700; }
.chips { display:flex; flex-wrap:wrap; gap:6px; margin:0 0 12px; padding:0; list-style:none; }
.chips li { background:var(--track); border-radius:99px; padding:2px 11px; font-size:13px; }
.groups { margin-bottom:10px; display:flex; flex-wrap:wrap; gap:10px 34px; }
.ranks { width:auto; } .ranks th, .ranks td { border:0; padding:3px; text-align:center; }
.ranks td span { display:block; min-width:40px; border-radius:6px; padding:5px 8px;
  color:var(--inbar); font-weight:700; background:var(--s1); }
.ranks.seq td span { background:var(--s3); }
pre { background:var(--code); border:1px solid var(--rule); border-radius:8px; margin:0;
  padding:12px 14px; overflow-x:auto; white-space:pre-wrap; overflow-wrap:anywhere;
  font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace; }
details summary { cursor:pointer; color:var(--soft); margin-top:10px; }
summary h2 { display:inline; color:var(--ink); } section > details > summary { margin-top:0; }
details[open] > summary { margin-bottom:10px; }
@media (max-width:640px) {
  main { padding:16px 10px 40px; } h1 { font-size:22px; }
  section { padding:13px 12px; border-radius:8px; }
  .cards { gap:8px; } .card { padding:9px 11px; }
  ul:not([class]) { padding-left:20px; margin:0; } pre { padding:10px; }
  /* A chart is drawn 560 wide: its labels keep a size that can be read, and take room beside it. */
  svg.chart { overflow:visible; padding:0 0 10px 20px; } svg.chart text { font-size:20px; }
  svg.chart text[text-anchor=middle] { transform:translateY(5px); }
  svg.chart text.unit { transform:translateY(18px); }
  table { font-size:13px; border-collapse:separate; border-spacing:0; }
  th, td { padding:4px 7px; } th { font-size:12px; }
  /* What is wider than the page moves below its first column, and says that it moves. */
  .scroll:has(> svg.timeline)::before, .scroll:has(> table:not(.ranks, .mesh))::before {
    content:"wider than the page: move it sideways ↔"; display:block; position:sticky; left:0;
    color:var(--soft); font-size:12px; margin-bottom:4px; }
  .scroll > table:not(.ranks) th:first-child, .scroll > table:not(.ranks) td:first-child {
    position:sticky; left:0; background:var(--card); }
  .bars { grid-template-columns:1fr max-content; gap:2px 10px; }
  .bars > span:nth-child(3n+1) { grid-column:1 / -1; margin-top:5px; }
}
@media print { section, .card { break-inside:avoid; } body { background:none; } }
"""
