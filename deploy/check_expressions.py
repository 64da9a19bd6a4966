#!/usr/bin/env python3
"""Asks a live Prometheus every expression of the rules and the dashboard.

  check_expressions.py PROMETHEUS_URL METRICS_URL

Fails when an expression is refused, names a metric that the server's table does not declare, or answers nothing although
every metric in it has samples; and when a rule that Prometheus evaluates is unhealthy.
"""
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NAME = re.compile(r"\b(?:stillhouse|grpc_server)[a-z0-9_:]*")


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def base(name):
    return re.sub(r"_(bucket|sum|count)$", "", name)


def declared():
    table = open(os.path.join(ROOT, "server/metrics/metric_table.cc"), encoding="utf-8").read()
    return set(re.findall(r'"((?:stillhouse|grpc_server)_[a-z0-9_]+)"', table))


def dashboard():
    board = json.load(open(os.path.join(ROOT, "deploy/grafana/stillhouse.json"), encoding="utf-8"))
    # What Grafana puts in.
    values = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in values.items():
                expression = expression.replace(variable, value)
            yield "dashboard: " + panel["title"], expression


def main():
    prometheus, metrics = sys.argv[1:3]
    known = declared()
    sampled = {base(line.split("{")[0].split(" ")[0]) for line in get(metrics).splitlines() if not line.startswith("#")}
    expressions = list(dashboard())
    records = set()
    failures = []
    for group in json.loads(get(prometheus + "/api/v1/rules"))["data"]["groups"]:
        for rule in group["rules"]:
            expressions.append(("rule: " + rule["name"], rule["query"]))
            if rule["type"] == "recording":
                records.add(rule["name"])
            if rule["health"] != "ok":
                failures.append(f"rule {rule['name']}: {rule['health']}, {rule.get('lastError', '')}")
    answered = 0
    empty = []
    for title, expression in expressions:
        names = {base(name) for name in NAME.findall(re.sub(r'"[^"]*"', '""', expression)) if name not in records}
        unknown = {name for name in names if name not in known and not name.startswith("stillhouse:")}
        if unknown:
            failures.append(f"{title}: no such metric: {', '.join(sorted(unknown))}")
            continue
        url = prometheus + "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            result = json.loads(get(url))["data"]["result"]
        except urllib.error.HTTPError as error:
            failures.append(f"{title}: {error.read().decode()[:300]}")
            continue
        # A comparison, or a division by a rate that may be zero, is rightly empty; so is what has no samples yet.
        may_be_empty = re.search(r"[<>]|==|/", expression) or not names <= sampled
        if not result and not may_be_empty:
            failures.append(f"{title}: no answer to {expression}")
        elif not result:
            empty.append(title)
        answered += bool(result)
    print(f"{len(expressions)} expressions, {len(records)} of them recorded: {answered} answered")
    # Alerts that do not fire, and metrics of things that have not happened yet.
    print(f"{len(empty)} rightly empty: {', '.join(empty)}")
    for failure in failures:
        print("FAILED " + failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
