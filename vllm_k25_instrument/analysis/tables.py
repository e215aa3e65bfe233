"""A key_averages table reduced: sums by category, and nothing that needs a timeline."""

from __future__ import annotations

from vllm_k25_instrument.analysis.capture import ActivityKind, KernelTable
from vllm_k25_instrument.analysis.classify import Classifier
from vllm_k25_instrument.analysis.findings import MAX_KERNELS, Reduced
from vllm_k25_instrument.report.breakdown import category_order
from vllm_k25_instrument.report.gpu import CategoryTotal, GpuTotals, KernelTotal, RankFindings


def reduce_table(table: KernelTable, classifier: Classifier) -> Reduced:
    """The findings of `table`, which knows no steps, nor when anything ran: spans and exposed times are unknown."""
    kinds = [ActivityKind(kind) for kind in table.kind.tolist()]
    kernel_names = [name for name, kind in zip(table.names, kinds, strict=True) if kind is ActivityKind.KERNEL]
    classifier = classifier.for_names(kernel_names)
    by_category: dict[str, CategoryTotal] = {}
    kernels = []
    counts, sums = dict.fromkeys(ActivityKind, 0), dict.fromkeys(ActivityKind, 0)
    rows = zip(table.names, kinds, table.count.tolist(), table.sum_ns.tolist(), strict=True)
    for name, kind, count, sum_ns in rows:
        verdict = classifier.classify(name, (), kind)
        category = str(verdict.category)
        total = CategoryTotal(count, sum_ns, None)
        by_category[category] = by_category[category] + total if category in by_category else total
        counts[kind] += count
        sums[kind] += sum_ns
        if kind is ActivityKind.KERNEL:
            kernels.append(KernelTotal(name, category, verdict.rule, count, sum_ns))
    totals = GpuTotals(
        kernels=counts[ActivityKind.KERNEL],
        kernel_ns=sums[ActivityKind.KERNEL],
        memcpys=counts[ActivityKind.MEMCPY],
        memcpy_ns=sums[ActivityKind.MEMCPY],
        memsets=counts[ActivityKind.MEMSET],
        memset_ns=sums[ActivityKind.MEMSET],
        by_category={name: by_category[name] for name in sorted(by_category, key=category_order)},
    )
    largest = sorted(kernels, key=lambda kernel: (-kernel.sum_ns, kernel.name))[:MAX_KERNELS]
    findings = RankFindings(
        rank=table.rank,
        path=str(table.path),
        totals=totals,
        kernels=tuple(largest),
        repeated_ns=table.repeated_ns,
        repeated_rows=table.repeated_rows,
    )
    return Reduced(findings, tuple(table.notes), table.complete)
