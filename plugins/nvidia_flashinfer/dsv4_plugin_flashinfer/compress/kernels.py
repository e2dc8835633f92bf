"""Kernels of the compressor; the definition is `dsv4core.ops.compress`.

A program has all channels of a group that a token completes: 128 threads of four channels each, several times
where groups are long. Only what kernels need is imported: the compiler runs a kernel's module again.
"""

# Annotations are looked at by the compiler, and cannot be strings.
import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Constexpr, Float32, Int32, Int64, cute

WIDTH, ROPE = 512, 64
CHANNELS = 4
"""Of a thread: 16 bytes."""
LANES = WIDTH // CHANNELS
WARPS = LANES // 32


@cute.jit
def four(pointer: cute.Pointer, offset: Int64) -> cute.Tensor:
    """Four values side by side, 16 bytes aligned."""
    return cute.make_tensor((pointer + offset).align(16), cute.make_layout(CHANNELS))


@cute.jit
def one(pointer: cute.Pointer, offset: Int64):
    """A value."""
    return cute.make_tensor(pointer + offset, cute.make_layout(1))[0]


@cute.jit
def pool(
    projected: cute.Pointer,
    token_stride: Int64,
    ape: cute.Pointer,
    table: cute.Pointer,
    states: cute.Pointer,
    state_page: Int64,
    state_rows: Int32,
    token: Int64,
    begin: Int64,
    position: Int64,
    highest: cute.Tensor,
    total: cute.Tensor,
    summed: cute.Tensor,
    groups: Constexpr,
    ratio: Constexpr,
    splits: Constexpr,
    batch: Constexpr,
):
    """A thread's rows of a group, weighed by their scores: sums that other threads' can be added to."""
    thread, _, _ = cute.arch.thread_idx()
    channel, part = thread % LANES * CHANNELS, thread // LANES
    own = groups * ratio // splits
    highest.fill(-Float32.inf)
    total.fill(0.0)
    summed.fill(0.0)
    for first in cutlass.range(0, own, batch, unroll=1):
        value = cute.make_rmem_tensor((batch, CHANNELS), Float32)
        score = cute.make_rmem_tensor((batch, CHANNELS), Float32)
        bias = cute.make_rmem_tensor((batch, CHANNELS), Float32)
        for turn in cutlass.range_constexpr(batch):
            row = part * own + first + turn
            back = groups * ratio - 1 - row
            column = Int64(row // ratio * WIDTH + channel)
            place = position - back
            there = place >= 0
            fresh = token - back >= begin
            known = Int64(0) if fresh else place if there else Int64(0)  # a fresh row may have no page
            # An address is chosen and not a value: the next row's loads do not wait for this one's.
            page = Int64(one(table, known // state_rows))
            kept = page * state_page + known % state_rows * (2 * groups * WIDTH) + column
            address = states.toint() + 4 * kept
            address = projected.toint() + 4 * ((token - back) * token_stride + column) if fresh else address
            address = address if there else projected.toint() + 4 * (token * token_stride + column)
            source = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
            values = four(source, Int64(0)).load()
            scores = four(source, Int64(groups * WIDTH)).load()
            for c in cutlass.range_constexpr(CHANNELS):
                value[turn, c] = values[c]
                score[turn, c] = scores[c]
                bias[turn, c] = Float32(0.0)
            if fresh:  # a state's score has it already
                added = four(ape, Int64(row % ratio) * (groups * WIDTH) + column).load()
                for c in cutlass.range_constexpr(CHANNELS):
                    bias[turn, c] = added[c]
            if not there:
                for c in cutlass.range_constexpr(CHANNELS):
                    value[turn, c] = Float32(0.0)
                    score[turn, c] = -Float32.inf
        for c in cutlass.range_constexpr(CHANNELS):
            top = highest[c]
            for turn in cutlass.range_constexpr(batch):
                score[turn, c] = score[turn, c] + bias[turn, c]
                top = cute.arch.fmax(top, score[turn, c])  # passes NaN over, which makes its weight NaN
            base = top if top > -Float32.inf else Float32(0.0)
            faded = cute.math.exp(highest[c] - base)
            weights = total[c] * faded
            weighed = summed[c] * faded
            for turn in cutlass.range_constexpr(batch):
                weight = cute.math.exp(score[turn, c] - base)
                weights = weights + weight
                weighed = weighed + weight * value[turn, c]
            highest[c] = top
            total[c] = weights
            summed[c] = weighed


@cute.jit
def together(
    highest: cute.Tensor, total: cute.Tensor, summed: cute.Tensor, shared: cute.Tensor, splits: Constexpr
):
    """The sums of all threads of a channel."""
    thread, _, _ = cute.arch.thread_idx()
    channel, part = thread % LANES * CHANNELS, thread // LANES
    cute.arch.sync_threads()  # an earlier group's are read
    for c in cutlass.range_constexpr(CHANNELS):
        shared[part, 0, channel + c] = highest[c]
        shared[part, 1, channel + c] = total[c]
        shared[part, 2, channel + c] = summed[c]
    cute.arch.sync_threads()
    for c in cutlass.range_constexpr(CHANNELS):
        top = shared[0, 0, channel + c]
        for other in cutlass.range_constexpr(1, splits):
            top = cute.arch.fmax(top, shared[other, 0, channel + c])
        base = top if top > -Float32.inf else Float32(0.0)
        weights = Float32(0.0)
        weighed = Float32(0.0)
        for other in cutlass.range_constexpr(splits):
            faded = cute.math.exp(shared[other, 0, channel + c] - base)
            weights = weights + faded * shared[other, 1, channel + c]
            weighed = weighed + faded * shared[other, 2, channel + c]
        total[c] = weights
        summed[c] = weighed


@cute.jit
def store_entry(
    row: cute.Tensor,
    sums: cute.Tensor,
    norm: cute.Pointer,
    rope: cute.Pointer,
    entries: cute.Pointer,
    scale: cute.Pointer,
    page: Int64,
    page_rows: Int32,
    eps: Float32,
    slot: Int64,
    position: Int64,
    ratio: Constexpr,
    scaled: Constexpr,
):
    """Normalise a pooled row, turn its last channels to the group's first position, and store it."""
    thread, _, _ = cute.arch.thread_idx()
    lane, part = thread % LANES, thread // LANES
    channel = lane * CHANNELS
    square = Float32(0.0)
    for c in cutlass.range_constexpr(CHANNELS):
        square = square + row[c] * row[c]
    square = cute.arch.warp_reduction(square, lambda x, y: x + y)
    cute.arch.sync_threads()  # an earlier row's are read
    if thread < LANES and lane % 32 == 0:
        sums[lane // 32] = square
    cute.arch.sync_threads()
    if part == 0:
        square = Float32(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            square = square + sums[warp]
        factor = cute.math.rsqrt(square / WIDTH + eps)
        weights = four(norm, Int64(channel)).load()
        for c in cutlass.range_constexpr(CHANNELS):
            row[c] = row[c] * factor * weights[c]
        if channel >= WIDTH - ROPE:
            angle = position // ratio * ratio * ROPE + (channel - (WIDTH - ROPE)) // 2
            for pair in cutlass.range_constexpr(CHANNELS // 2):
                cos, sin = one(rope, angle + pair), one(rope, angle + pair + ROPE // 2)
                even, odd = row[2 * pair], row[2 * pair + 1]
                row[2 * pair] = even * cos - odd * sin
                row[2 * pair + 1] = odd * cos + even * sin
        if cutlass.const_expr(scaled):
            inverse = Float32(1.0) / one(scale, Int64(0))
            for c in cutlass.range_constexpr(CHANNELS):
                row[c] = row[c] * inverse
        target = slot // page_rows * page + slot % page_rows * WIDTH + channel
        aligned = CHANNELS * entries.value_type.width // 8
        out = cute.make_tensor((entries + target).align(aligned), cute.make_layout(CHANNELS))
        out.store(row.load().to(entries.value_type))


@cute.jit
def keep(
    projected: cute.Pointer,
    token_stride: Int64,
    ape: cute.Pointer,
    states: cute.Pointer,
    state_page: Int64,
    state_rows: Int32,
    slot: Int64,
    token: Int64,
    position: Int64,
    groups: Constexpr,
    ratio: Constexpr,
    threads: Constexpr,
):
    """Store a token's values, and its scores with what its place in the group adds."""
    thread, _, _ = cute.arch.thread_idx()
    if slot >= 0:
        source = token * token_stride
        target = slot // state_rows * state_page + slot % state_rows * (2 * groups * WIDTH)
        place = position if position >= 0 else Int64(0)
        bias = place % ratio * (groups * WIDTH)
        for first in cutlass.range_constexpr(0, groups * LANES, threads):
            channel = Int64((first + thread) * CHANNELS)
            if first + thread < groups * LANES:
                four(states, target + channel).store(four(projected, source + channel).load())
                score = four(projected, source + groups * WIDTH + channel).load()
                added = four(ape, bias + channel).load()
                four(states, target + groups * WIDTH + channel).store(score + added)


@cute.kernel
def complete(
    projected: cute.Pointer,
    ape: cute.Pointer,
    positions: cute.Pointer,
    requests: cute.Pointer,
    starts: cute.Pointer,
    slots: cute.Pointer,
    table: cute.Pointer,
    states: cute.Pointer,
    state_slots: cute.Pointer,
    norm: cute.Pointer,
    rope: cute.Pointer,
    entries: cute.Pointer,
    scale: cute.Pointer,
    token_stride: Int64,
    table_stride: Int64,
    state_page: Int64,
    state_rows: Int32,
    page: Int64,
    page_rows: Int32,
    eps: Float32,
    groups: Constexpr,
    ratio: Constexpr,
    splits: Constexpr,
    batch: Constexpr,
    scaled: Constexpr,
    keeps: Constexpr,
):
    """Entries. With `keeps` the program of a request's first token has all of its tokens, states included."""
    block, _, _ = cute.arch.block_idx()
    memory = cutlass.utils.SmemAllocator()
    layout = cute.make_layout((splits, 3, WIDTH), stride=(3 * WIDTH, WIDTH, 1))
    shared = memory.allocate_tensor(Float32, layout, byte_alignment=16)
    sums = memory.allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
    highest = cute.make_rmem_tensor(CHANNELS, Float32)
    total = cute.make_rmem_tensor(CHANNELS, Float32)
    summed = cute.make_rmem_tensor(CHANNELS, Float32)
    request = Int64(one(requests, Int64(block)))
    request = request if request >= 0 else Int64(0)  # padding may have none
    begin, end = one(starts, request), block + 1
    if cutlass.const_expr(keeps):
        end = one(starts, request + 1)
        end = end if block == begin else block  # another program has it
    for number in cutlass.range(block, end, unroll=1):
        other = Int64(number)
        slot = one(slots, other)
        if slot >= 0:
            position = one(positions, other)
            pool(
                projected,
                token_stride,
                ape,
                table + request * table_stride,
                states,
                state_page,
                state_rows,
                other,
                Int64(begin),
                position,
                highest,
                total,
                summed,
                groups,
                ratio,
                splits,
                batch,
            )
            if cutlass.const_expr(splits > 1):
                together(highest, total, summed, shared, splits)
            for c in cutlass.range_constexpr(CHANNELS):
                summed[c] = summed[c] / total[c]
            store_entry(
                summed, sums, norm, rope, entries, scale, page, page_rows, eps, slot, position, ratio, scaled
            )
    if cutlass.const_expr(keeps):
        cute.arch.sync_threads()  # all of this request's states are read
        for number in cutlass.range(block, end, unroll=1):
            other = Int64(number)
            keep(
                projected,
                token_stride,
                ape,
                states,
                state_page,
                state_rows,
                one(state_slots, other),
                other,
                one(positions, other),
                groups,
                ratio,
                LANES * splits,
            )


@cute.kernel
def keep_states(
    projected: cute.Pointer,
    ape: cute.Pointer,
    positions: cute.Pointer,
    states: cute.Pointer,
    state_slots: cute.Pointer,
    token_stride: Int64,
    state_page: Int64,
    state_rows: Int32,
    groups: Constexpr,
    ratio: Constexpr,
):
    """States of all tokens, when no entry needs those before them any more."""
    block, _, _ = cute.arch.block_idx()
    token = Int64(block)
    slot = one(state_slots, token)
    position = one(positions, token)
    keep(
        projected,
        token_stride,
        ape,
        states,
        state_page,
        state_rows,
        slot,
        token,
        position,
        groups,
        ratio,
        LANES,
    )


@cute.jit
def launch(
    projected: cute.Pointer,
    ape: cute.Pointer,
    positions: cute.Pointer,
    requests: cute.Pointer,
    starts: cute.Pointer,
    slots: cute.Pointer,
    table: cute.Pointer,
    states: cute.Pointer,
    state_slots: cute.Pointer,
    norm: cute.Pointer,
    rope: cute.Pointer,
    entries: cute.Pointer,
    scale: cute.Pointer,
    tokens: Int32,
    token_stride: Int64,
    table_stride: Int64,
    state_page: Int64,
    state_rows: Int32,
    page: Int64,
    page_rows: Int32,
    eps: Float32,
    stream: CUstream,
    groups: Constexpr,
    ratio: Constexpr,
    splits: Constexpr,
    batch: Constexpr,
    scaled: Constexpr,
    keeps: Constexpr,
):
    """One launch where all requests decode, else two."""
    complete(
        projected,
        ape,
        positions,
        requests,
        starts,
        slots,
        table,
        states,
        state_slots,
        norm,
        rope,
        entries,
        scale,
        token_stride,
        table_stride,
        state_page,
        state_rows,
        page,
        page_rows,
        eps,
        groups,
        ratio,
        splits,
        batch,
        scaled,
        keeps,
    ).launch(grid=(tokens, 1, 1), block=(LANES * splits, 1, 1), stream=stream)
    if cutlass.const_expr(not keeps):
        keep_states(
            projected,
            ape,
            positions,
            states,
            state_slots,
            token_stride,
            state_page,
            state_rows,
            groups,
            ratio,
        ).launch(grid=(tokens, 1, 1), block=(LANES, 1, 1), stream=stream)
