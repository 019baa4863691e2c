"""Coarse narrowing: in which module, or node of the backward pass, was the first nonfinite value born?"""
