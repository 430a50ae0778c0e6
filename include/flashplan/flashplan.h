// SPDX-License-Identifier: Apache-2.0
// The whole public API. Compiles as C++17 or later; needs no CUDA header.
#pragma once

#define FLASHPLAN_VERSION_MAJOR 0
#define FLASHPLAN_VERSION_MINOR 1
#define FLASHPLAN_VERSION_PATCH 0

#include "flashplan/activation.h"
#include "flashplan/gather.h"
#include "flashplan/kv_cache.h"
#include "flashplan/merge.h"
#include "flashplan/mla.h"
#include "flashplan/norm.h"
#include "flashplan/penalties.h"
#include "flashplan/plan.h"
#include "flashplan/prefixes.h"
#include "flashplan/quantize.h"
#include "flashplan/rope.h"
#include "flashplan/runtime.h"
#include "flashplan/sampling.h"
#include "flashplan/schedule.h"
#include "flashplan/speculative.h"
#include "flashplan/status.h"
#include "flashplan/tensor.h"
#include "flashplan/variant.h"
